//! One small training run, the same for every backend, and how to compare two of them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bonfire::{Member, ReplicaDevice, ReplicaOptions, Spread};
use burn::{
    module::{ModuleVisitor, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams, Optimizer},
    prelude::*,
    tensor::{TensorData, backend::AutodiffBackend},
};

use super::models::Classifier;

pub const LEARNING_RATE: f64 = 1e-3;
pub const NUM_STEPS: usize = 30;

/// Backends draw from generators of the whole process: tests that seed them take turns.
pub fn draw_alone() -> MutexGuard<'static, ()> {
    static DRAWING: Mutex<()> = Mutex::new(());
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A replica of `num_members` default devices.
pub fn replica<B: Member>(num_members: usize, spread: Spread) -> ReplicaDevice<B> {
    replica_of(vec![B::Device::default(); num_members], spread)
}

/// A replica of these devices.
pub fn replica_of<B: Member>(devices: Vec<B::Device>, spread: Spread) -> ReplicaDevice<B> {
    let options = ReplicaOptions { spread, timeout: std::time::Duration::from_secs(60), ..Default::default() };
    ReplicaDevice::with_options(devices, options).unwrap()
}

/// Small models are spread as soon as an operation is shared at all, not only when it pays.
pub const ALWAYS: Spread = Spread::OnHeavyOp { min_work: 1 };

/// Numbers in [-1, 1) that depend on nothing but their position.
pub fn pseudo_random(seed: u64, num: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    (0..num)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// [`pseudo_random`] numbers as a tensor.
pub fn floats<B: Backend, const D: usize>(seed: u64, shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    let values = pseudo_random(seed, shape.iter().product());
    Tensor::<B, 1>::from_data(TensorData::from(values.as_slice()), device).reshape(shape)
}

/// What a run leaves behind.
#[derive(Debug, PartialEq)]
pub struct Run {
    /// One per step.
    pub losses: Vec<f64>,
    /// Of the first step, one per parameter.
    pub gradients: Vec<Vec<f64>>,
    /// After the last step, all parameters.
    pub parameters: Vec<f64>,
}

/// [`NUM_STEPS`] steps of Adam on fixed data, everything drawn from `seed`.
pub fn train<B: AutodiffBackend, M>(device: &B::Device, batch_size: usize, seed: u64) -> Run
where
    M: Classifier<B> + burn::module::AutodiffModule<B>,
{
    B::seed(device, seed);
    let mut model = M::init(device);
    let mut optimizer = AdamConfig::new().init::<B, M>();
    let loss_fn = CrossEntropyLossConfig::new().init(device);
    let mut run = Run { losses: vec![], gradients: vec![], parameters: vec![] };
    for step in 0..NUM_STEPS {
        let images = floats::<B, 4>(seed + step as u64, [batch_size, 1, 12, 12], device);
        let labels: Vec<i64> = (0..batch_size).map(|item| ((item * 7 + step * 3) % 10) as i64).collect();
        let labels = Tensor::<B, 1, Int>::from_data(TensorData::from(labels.as_slice()), device);

        let loss = loss_fn.forward(model.forward(images), labels);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        if step == 0 {
            run.gradients = gradients(&model, &grads);
        }
        run.losses.push(loss.into_scalar().elem());
        model = optimizer.step(LEARNING_RATE, model, grads);
    }
    run.parameters = parameters(&model);
    run
}

/// Every gradient, in the order of the model's parameters.
pub fn gradients<B: AutodiffBackend, M: Module<B>>(model: &M, grads: &GradientsParams) -> Vec<Vec<f64>> {
    struct Visitor<'a> {
        grads: &'a GradientsParams,
        found: Vec<Vec<f64>>,
    }
    impl<B: AutodiffBackend> ModuleVisitor<B> for Visitor<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) {
                self.found.push(grad.into_data().iter::<f64>().collect());
            }
        }
    }
    let mut visitor = Visitor { grads, found: vec![] };
    model.visit(&mut visitor);
    visitor.found
}

/// Every parameter's values, one after the other.
pub fn parameters<B: Backend, M: Module<B>>(model: &M) -> Vec<f64> {
    struct Visitor(Vec<f64>);
    impl<B: Backend> ModuleVisitor<B> for Visitor {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f64>());
        }
    }
    let mut visitor = Visitor(vec![]);
    model.visit(&mut visitor);
    visitor.0
}

/// How far two runs may be apart. Sums over members are made in another order than on one device, and thirty steps of
/// Adam, which divides by the gradient's own size, carry that on.
#[derive(Clone, Copy)]
pub struct Tolerance {
    pub first_loss: f64,
    pub last_loss: f64,
    pub gradient: f64,
    /// Norm below which a gradient is rounding alone.
    pub zero: f64,
}

pub const F32: Tolerance = Tolerance { first_loss: 1e-5, last_loss: 1e-3, gradient: 1e-5, zero: 1e-6 };
pub const F64: Tolerance = Tolerance { first_loss: 1e-9, last_loss: 1e-9, gradient: 1e-9, zero: 1e-14 };

/// # Panics
///
/// If the runs differ by more than the tolerance; says what `context` it was.
pub fn assert_equal(run: &Run, plain: &Run, tolerance: Tolerance, context: &str) {
    let close = |index: usize, tolerance: f64| {
        let (ours, theirs) = (run.losses[index], plain.losses[index]);
        let limit = tolerance * theirs.abs().max(1.0);
        assert!((ours - theirs).abs() <= limit, "{context}: loss {index} is {ours}, on one device {theirs}");
    };
    assert_eq!(run.losses.len(), plain.losses.len());
    close(0, tolerance.first_loss);
    close(NUM_STEPS - 1, tolerance.last_loss);
    assert_eq!(run.gradients.len(), plain.gradients.len(), "{context}: number of gradients");
    assert!(!plain.gradients.is_empty());
    for (index, (ours, theirs)) in run.gradients.iter().zip(&plain.gradients).enumerate() {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let distance = norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b));
        let theirs = norm(&mut theirs.iter().copied());
        // A bias before BatchNorm has a true gradient of zero: what both compute there is rounding alone.
        let limit = if theirs < tolerance.zero { tolerance.zero } else { tolerance.gradient * (theirs + 1e-6) };
        assert!(distance <= limit, "{context}: gradient {index} is off by {distance:e}, allowed {limit:e}");
    }
}
