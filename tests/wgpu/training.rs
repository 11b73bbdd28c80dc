//! A few training steps on members of one device, beside plain Flex.

use bonfire::collectives::Collective;
use burn::{
    backend::Autodiff,
    module::{ModuleVisitor, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig, momentum::MomentumConfig},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{
        Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_flex::{Flex, FlexDevice};
use burn_wgpu::Wgpu;

use crate::{
    device::{B, lavapipe, replica},
    models::{Classifier, Cnn, IMAGE_SIZE, Mlp, NUM_CLASSES, Trainable},
};

const NUM_STEPS: usize = 6;
/// Sums of f32 in another order, by other kernels, over [`NUM_STEPS`] steps.
const TOLERANCE: f64 = 1e-3;

/// What a run leaves behind.
#[derive(Debug, PartialEq)]
struct Run {
    /// One per step.
    losses: Vec<f64>,
    /// After the last step.
    parameters: Vec<f64>,
    /// Of the trained model without gradients, which uses the running statistics.
    logits: Vec<f64>,
}

/// Numbers in [-1, 1] that depend on nothing but `seed` and their position.
fn images<B: Backend>(seed: usize, batch_size: usize, device: &B::Device) -> Tensor<B, 4> {
    let num = batch_size * IMAGE_SIZE * IMAGE_SIZE;
    let values: Vec<f32> = (0..num).map(|i| ((seed * 7919 + i * 31) as f32).sin()).collect();
    Tensor::from_data(TensorData::new(values, [batch_size, 1, IMAGE_SIZE, IMAGE_SIZE]), device)
}

fn labels<B: Backend>(seed: usize, batch_size: usize, device: &B::Device) -> Tensor<B, 1, Int> {
    let values: Vec<i64> = (0..batch_size).map(|item| ((item * 3 + seed) % NUM_CLASSES) as i64).collect();
    Tensor::from_data(TensorData::from(values.as_slice()), device)
}

fn values<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn parameters<B: Backend, M: Classifier<B>>(model: &M) -> Vec<f64> {
    struct Collect(Vec<f64>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(values(param.val()));
        }
    }
    let mut collect = Collect(Vec::new());
    model.visit(&mut collect);
    collect.0
}

/// A model drawn on Flex, for any backend to load.
fn initial<M: Classifier<Flex>>() -> Vec<u8> {
    let model = M::init(&FlexDevice);
    BinBytesRecorder::<FullPrecisionSettings>::new().record(model.into_record(), ()).unwrap()
}

/// Trains on fixed data, from the parameters in `initial`.
fn train<B, M, O>(initial: &[u8], optimizer: O, batch_size: usize, device: &B::Device) -> Run
where
    B: AutodiffBackend,
    M: Trainable<B>,
    O: Optimizer<M, B>,
{
    let record = BinBytesRecorder::<FullPrecisionSettings>::new().load(initial.to_vec(), device).unwrap();
    let mut model = M::init(device).load_record(record);
    let mut optimizer = optimizer;
    let loss_fn = CrossEntropyLossConfig::new().init(device);
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let logits = model.forward(images(step, batch_size, device));
        let loss = loss_fn.forward(logits, labels(step, batch_size, device));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.02, model, grads);
        losses.extend(values(loss));
    }
    let logits = values(model.valid().forward(images(99, batch_size, device)));
    Run { losses, parameters: parameters(&model), logits }
}

fn assert_close(what: &str, found: &Run, expected: &Run) {
    let parts = [
        ("loss", &found.losses, &expected.losses),
        ("parameter", &found.parameters, &expected.parameters),
        ("logit", &found.logits, &expected.logits),
    ];
    for (part, found, expected) in parts {
        assert_eq!(found.len(), expected.len(), "{what}: {part}");
        for (i, (a, b)) in found.iter().zip(expected).enumerate() {
            assert!((a - b).abs() <= TOLERANCE, "{what}: {part} {i} is {a}, with Flex {b}");
        }
    }
}

/// Flex beside the plain device and one to three members of it; then the same members again, which give the same bits.
macro_rules! check {
    ($model:ident, $optimizer:expr, $batch_size:expr) => {{
        let name = stringify!($model);
        let initial = initial::<$model<Flex>>();
        let flex = train::<Autodiff<Flex>, $model<_>, _>(&initial, $optimizer, $batch_size, &FlexDevice);
        assert!(flex.losses.iter().all(|loss| loss.is_finite()), "{name}: {:?}", flex.losses);
        let plain = train::<Autodiff<Wgpu>, $model<_>, _>(&initial, $optimizer, $batch_size, &lavapipe());
        assert_close(&format!("{name} without a replica"), &plain, &flex);
        for num_members in 1..=3 {
            let device = replica(num_members);
            let what = format!("{name} on {num_members} members");
            let run = || train::<Autodiff<B>, $model<_>, _>(&initial, $optimizer, $batch_size, &device);
            let first = run();
            assert_close(&what, &first, &flex);
            let tally = device.collectives().tally();
            assert!(tally.num_calls(Collective::AllReduce) >= NUM_STEPS as u64, "{what}: nothing was shared, {tally}");
            assert_eq!(run(), first, "{what}, once more");
        }
    }};
}

#[test]
fn an_mlp_trains_as_on_flex() {
    check!(Mlp, AdamConfig::new().init(), 9);
}

/// The last member has no item at all.
#[test]
fn an_mlp_with_fewer_items_than_members_trains_as_on_flex() {
    check!(Mlp, AdamConfig::new().init(), 2);
}

/// Not with Adam: the gradient of a bias before a BatchNorm is zero but for rounding, which Adam would make large.
#[test]
fn a_cnn_with_batch_norm_trains_as_on_flex() {
    check!(Cnn, SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(), 7);
}
