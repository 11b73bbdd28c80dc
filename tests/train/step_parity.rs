//! Twenty steps of real models on 1 to 4 ranks against one device with the same global batch.

#![allow(clippy::single_range_in_vec_init, reason = "a rank with one micro step")]

use core::ops::Range;

use bonfire::{
    collectives::Communicator,
    train::{GradientSink, ReduceDType, SyncOptions, TrainingStep, parameters},
};
use bonfire_tests::images::LeNet;
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig, momentum::MomentumConfig},
    tensor::{Int, Tensor, TensorData, activation::tanh, backend::Backend},
};
use burn_flex::Flex;

use crate::step::each_rank;

type B = Autodiff<Flex>;

const NUM_STEPS: usize = 20;
const NUM_ITEMS: usize = 12;

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl Mlp<B> {
    fn new() -> Self {
        let device = Default::default();
        Self { hidden: LinearConfig::new(64, 32).init(&device), output: LinearConfig::new(32, 10).init(&device) }
    }
}

/// A classifier of 10 classes.
trait Classifier: AutodiffModule<B> + Sync {
    /// For `NUM_ITEMS` items of a global batch.
    const SIDE: usize;

    fn logits(&self, images: Tensor<B, 4>) -> Tensor<B, 2>;
}

impl Classifier for Mlp<B> {
    const SIDE: usize = 8;

    fn logits(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.output.forward(tanh(self.hidden.forward(images.flatten(1, 3))))
    }
}

impl Classifier for LeNet<B> {
    const SIDE: usize = 16;

    fn logits(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.forward(images)
    }
}

/// Numbers in -1..1 that look random, from a counter.
fn noise(seed: usize) -> f32 {
    let mixed = (seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// The loss over some items of a step's global batch, and its gradients.
fn loss<M: Classifier>(model: &M, step: usize, items: Range<usize>) -> (f64, GradientsParams) {
    let (device, num, pixels) = (Default::default(), items.len(), M::SIDE * M::SIDE);
    // Four global batches, again and again.
    let first = (step % 4 * NUM_ITEMS + items.start) * pixels;
    let images: Vec<f32> = (first..first + num * pixels).map(noise).collect();
    let classes: Vec<i64> = items.map(|item| ((step % 4 * 7 + item * 3) % 10) as i64).collect();
    let images = Tensor::from_data(TensorData::new(images, [num, 1, M::SIDE, M::SIDE]), &device);
    let classes = Tensor::<B, 1, Int>::from_data(TensorData::new(classes, [num]), &device);
    let loss = CrossEntropyLossConfig::new().init(&device).forward(model.logits(images), classes);
    (f64::from(loss.clone().into_scalar()), GradientsParams::from_grads(loss.backward(), model))
}

fn values<M: Module<B>>(model: &M) -> Vec<f32> {
    struct Read(Vec<f32>);
    impl ModuleVisitor<B> for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

/// How far `found` is from `expected` in norm, relative to the norm.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let difference: f64 = found.iter().zip(expected).map(|(found, expected)| square(found - expected)).sum();
    (difference / expected.iter().copied().map(square).sum::<f64>()).sqrt()
}

/// The model with its values drawn: clones of one that is not yet draw their own.
fn drawn<M: Module<B>>(model: M) -> M {
    values(&model);
    model
}

struct Trained {
    losses: Vec<f64>,
    values: Vec<f32>,
}

fn one_device<M: Classifier>(model: &M, mut optimizer: impl Optimizer<M, B>) -> Trained {
    let mut model = model.clone().fork(&Default::default());
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let (value, gradients) = loss(&model, step, 0..NUM_ITEMS);
        losses.push(value);
        model = optimizer.step(0.05, model, gradients);
    }
    Trained { losses, values: values(&model) }
}

/// Each rank's micro steps of items of a global batch.
type Shares = Vec<Vec<Range<usize>>>;

/// Trains with these shares; the losses are those of the global batches.
fn on_ranks<M: Classifier, O: Optimizer<M, B>>(
    shares: &Shares,
    new_model: impl Fn() -> M + Sync,
    first: &M,
    new_optimizer: impl Fn() -> O + Sync,
    options: &SyncOptions,
) -> Vec<Trained> {
    each_rank(shares.len(), |communicator| {
        let own = &shares[communicator.rank()];
        // Other ranks start elsewhere, and with other ids.
        let model = if communicator.rank() == 0 { first.clone() } else { new_model() };
        let mut step = TrainingStep::new(communicator, &model, options.clone()).unwrap();
        let mut model = step.synchronise(model).unwrap();
        let mut optimizer = new_optimizer();
        let mut losses = Vec::new();
        for index in 0..NUM_STEPS {
            let mut sum = 0.0;
            for items in own {
                if items.is_empty() {
                    continue;
                }
                let (value, gradients) = loss(&model, index, items.clone());
                sum += value * items.len() as f64;
                step.micro_step(gradients, items.len() as f64).unwrap();
            }
            losses.push(sum / NUM_ITEMS as f64);
            let window = step.finish().unwrap().unwrap();
            assert_eq!(window.weight, NUM_ITEMS as f64);
            model = step.settle(optimizer.step(0.05, model, window.gradients)).unwrap();
        }
        Trained { losses, values: values(&model) }
    })
}

fn equals_one_device<M: Classifier, O: Optimizer<M, B>>(
    new_model: impl Fn() -> M + Sync,
    new_optimizer: impl Fn() -> O + Sync,
    tolerance: f64,
) {
    let first = drawn(new_model());
    let alone = one_device(&first, new_optimizer());
    assert!(distance(&values(&first), &alone.values) > 100.0 * tolerance, "training moves it far");
    let all: [Shares; 7] = [
        vec![vec![0..12]],
        vec![vec![0..5, 5..6, 6..12]],
        vec![vec![0..6], vec![6..12]],
        vec![vec![0..3, 3..6], vec![6..9, 9..12]],
        vec![vec![0..7], vec![7..12]],
        vec![vec![0..2, 2..3], vec![3..3], vec![3..12]],
        vec![vec![0..3], vec![3..6], vec![6..9], vec![9..12]],
    ];
    for shares in all {
        let trained = on_ranks(&shares, &new_model, &first, &new_optimizer, &SyncOptions::default());
        for rank in &trained {
            assert!(rank.values == trained[0].values, "bitwise equal ranks with {shares:?}");
        }
        for (step, expected) in alone.losses.iter().enumerate() {
            let found: f64 = trained.iter().map(|rank| rank.losses[step]).sum();
            assert!((found - expected).abs() < 1e-4, "step {step} of {shares:?}: loss {found}, one device {expected}");
        }
        let distance = distance(&trained[0].values, &alone.values);
        assert!(distance <= tolerance, "{distance} with {shares:?}");
        if shares == vec![vec![0..12]] {
            assert!(trained[0].values == alone.values, "world size 1 adds no rounding");
        }
    }
}

fn sgd<M: AutodiffModule<B>>() -> impl Optimizer<M, B> {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9))).init()
}

// Sums are made in another order than on one device, and twenty steps carry that on.

#[test]
fn an_mlp_with_sgd_on_ranks_equals_one_device() {
    equals_one_device(Mlp::new, sgd, 1e-5);
}

#[test]
fn an_mlp_with_adam_on_ranks_equals_one_device() {
    // Adam divides by the size of gradients: where they are nearly zero it enlarges their rounding.
    equals_one_device(Mlp::new, || AdamConfig::new().init(), 1e-3);
}

#[test]
fn a_cnn_on_ranks_equals_one_device() {
    equals_one_device(|| LeNet::new(16, &Default::default()), sgd, 1e-5);
}

#[test]
fn gradients_in_halves_train_to_nearly_the_same() {
    let first = drawn(Mlp::new());
    let alone = one_device(&first, sgd());
    for (reduce_dtype, tolerance) in [(ReduceDType::F16, 1e-2), (ReduceDType::BF16, 5e-2)] {
        let options = SyncOptions { reduce_dtype, ..SyncOptions::default() };
        let trained = on_ranks(&vec![vec![0..7], vec![7..12]], Mlp::new, &first, sgd, &options);
        assert!(trained[0].values == trained[1].values, "bitwise equal ranks");
        let distance = distance(&trained[0].values, &alone.values);
        assert!(distance > 1e-6 && distance < tolerance, "{distance} with {reduce_dtype:?}");
    }
}

/// Hands over each gradient of a module as a hook would.
struct Hooks<'a> {
    sink: &'a dyn GradientSink<Flex>,
    gradients: GradientsParams,
}

impl ModuleVisitor<B> for Hooks<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.gradients.remove::<Flex, D>(param.id) {
            self.sink.ready(param.id, gradient.into_primitive().tensor());
        }
    }
}

#[test]
fn gradients_handed_over_during_backward_give_the_same_bits_as_after_it() {
    let first = drawn(Mlp::new());
    // Tiny buckets: several collectives while gradients are still coming, forwards, so against the order of buckets.
    let options = SyncOptions { first_bucket_cap_bytes: 100, bucket_cap_bytes: 1500, ..SyncOptions::default() };
    let shares = [vec![0..2, 2..7], vec![7..12], vec![]];
    let train = |is_overlapped: bool| {
        each_rank(3, |communicator| {
            let own = &shares[communicator.rank()];
            let model = if communicator.rank() == 0 { first.clone() } else { Mlp::new() };
            let mut step = TrainingStep::new(communicator, &model, options.clone()).unwrap();
            let mut model = step.synchronise(model).unwrap();
            let mut optimizer = sgd();
            for index in 0..NUM_STEPS {
                for (place, items) in own.iter().enumerate() {
                    let (weight, is_last) = (items.len() as f64, place + 1 == own.len());
                    if is_overlapped && is_last {
                        let sink = step.overlapped(weight).unwrap();
                        let gradients = loss(&model, index, items.clone()).1;
                        model.visit(&mut Hooks { sink: &*sink, gradients });
                    } else {
                        step.micro_step(loss(&model, index, items.clone()).1, weight).unwrap();
                    }
                }
                let window = step.finish().unwrap().unwrap();
                model = step.settle(optimizer.step(0.05, model, window.gradients)).unwrap();
            }
            values(&model)
        })
    };
    let (plain, overlapped) = (train(false), train(true));
    assert!(plain == overlapped, "same bits");
    assert!(plain[0] == plain[2], "bitwise equal ranks");
    assert_eq!(parameters::<B, _>(&first).len(), 4);
}

/// CASES 47
#[test]
fn autodiff_on_four_threads_at_once_for_300_steps_equals_the_same_steps_one_after_the_other() {
    const NUM_RANKS: usize = 4;
    const NUM_LONG: usize = 300;
    let items = |rank: usize| rank * 3..rank * 3 + 3;
    let first = drawn(Mlp::new());
    let at_once = each_rank(NUM_RANKS, |communicator| {
        let rank = communicator.rank();
        let model = if rank == 0 { first.clone() } else { Mlp::new() };
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        let mut model = step.synchronise(model).unwrap();
        let mut optimizer = sgd();
        for index in 0..NUM_LONG {
            step.micro_step(loss(&model, index, items(rank)).1, 3.0).unwrap();
            let window = step.finish().unwrap().unwrap();
            model = step.settle(optimizer.step(0.05, model, window.gradients)).unwrap();
        }
        values(&model)
    });

    let (mut model, mut optimizer) = (first.clone().fork(&Default::default()), sgd());
    for index in 0..NUM_LONG {
        let mut all: Vec<GradientsParams> = (0..NUM_RANKS).map(|rank| loss(&model, index, items(rank)).1).collect();
        let mut mean = Mean { all: &mut all, mean: GradientsParams::new() };
        model.visit(&mut mean);
        let gradients = mean.mean;
        model = optimizer.step(0.05, model, gradients);
    }
    let expected = values(&model);
    assert!(expected.iter().all(|value| value.is_finite()));
    assert!(at_once.iter().all(|values| *values == expected), "bit for bit");
}

/// The mean of several gradients, summed in order.
struct Mean<'a> {
    all: &'a mut [GradientsParams],
    mean: GradientsParams,
}

impl ModuleVisitor<B> for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let num = self.all.len() as f64;
        let gradients = self.all.iter_mut().filter_map(|gradients| gradients.remove::<Flex, D>(param.id));
        if let Some(sum) = gradients.reduce(|sum, gradient| sum + gradient) {
            self.mean.register(param.id, sum / num);
        }
    }
}
