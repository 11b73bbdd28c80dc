//! Training with gradients that are reduced while backward runs, against training without.

use std::{
    num::NonZeroUsize,
    sync::{Arc, Mutex},
    time::Duration,
};

use bonfire::{
    collectives::{Communicator, ThreadCommunicator},
    train::{AnyHooks, Hooks, Overlap, SyncBatchNorm, SyncGroup, SyncOptions, TrainingStep},
};
use bonfire_tests::images::ResNet;
use burn::{
    backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing},
    module::{AutodiffModule, Module, ModuleVisitor, Param},
    nn::{BatchNormConfig, Linear, LinearConfig},
    optim::{AdamConfig, GradientsAccumulator, GradientsParams, Optimizer},
    tensor::{Tensor, backend::Backend},
};
use burn_flex::Flex;

use crate::{models::filled, step::each_rank};

type B = Autodiff<Flex>;

/// Layers that may be left out.
#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl Mlp<B> {
    fn new() -> Self {
        let device = Default::default();
        filled(Self { layers: (0..3).map(|_| LinearConfig::new(4, 4).init(&device)).collect() })
    }

    fn gradients(&self, layers: &[usize], seed: usize) -> GradientsParams {
        let input = values(seed, 8).reshape([2, 4]);
        let output = layers.iter().fold(input, |x, &layer| self.layers[layer].forward(x).tanh());
        GradientsParams::from_grads(output.powi_scalar(2).mean().backward(), self)
    }
}

fn values(seed: usize, length: usize) -> Tensor<B, 1> {
    let values: Vec<f32> = (0..length).map(|index| ((index * 7 + seed * 31) as f32).sin()).collect();
    Tensor::from_floats(values.as_slice(), &Default::default())
}

/// The values of trained parameters, and of running statistics.
#[derive(Default, PartialEq)]
struct Bits {
    parameters: Vec<u8>,
    statistics: Vec<u8>,
}

impl ModuleVisitor<B> for Bits {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let bits = if param.is_require_grad() { &mut self.parameters } else { &mut self.statistics };
        bits.extend(param.val().into_data().as_bytes());
    }
}

fn bits(model: &impl Module<B>) -> Bits {
    let mut bits = Bits::default();
    model.visit(&mut bits);
    bits
}

/// Small buckets, so that several are on their way during one backward pass.
fn options() -> SyncOptions {
    SyncOptions { first_bucket_cap_bytes: 64, bucket_cap_bytes: 1 << 12, ..SyncOptions::default() }
}

/// The bits of the model that each rank has after windows of two micro steps, and whether its overlap was on.
///
/// `gradients` gives those of a rank's micro step of a window, or none if the rank has no items in it.
fn train<M: AutodiffModule<B>>(
    num_ranks: usize,
    make: fn() -> M,
    overlap: fn() -> Overlap<B>,
    gradients: impl Fn(&M, usize, usize) -> Option<GradientsParams> + Sync,
) -> Vec<(Bits, bool)> {
    each_rank(num_ranks, |communicator| {
        let (rank, mut overlap) = (communicator.rank(), overlap());
        let model = make();
        let mut step = TrainingStep::new(communicator, &model, options()).unwrap();
        let mut model = step.synchronise(model).unwrap();
        let mut optimizer = AdamConfig::new().init::<B, M>();
        for window in 0..8 {
            if let Some(gradients) = gradients(&model, rank, 2 * window) {
                step.micro_step(gradients, 1.0).unwrap();
            }
            let run = |model: &M| gradients(model, rank, 2 * window + 1);
            if rank < 2 {
                let weight = 2.0 + rank as f64;
                overlap.micro_step(&mut step, &model, weight, |model| (run(model).unwrap(), ())).unwrap();
            }
            let reduced = step.finish().unwrap().unwrap();
            model = step.settle(optimizer.step(0.01, model, reduced.gradients)).unwrap();
        }
        (bits(&model), overlap.is_on())
    })
}

/// Checks training with overlap against training without; the third rank never has items.
fn assert_same_bits<M: AutodiffModule<B>>(
    make: fn() -> M,
    is_on: [bool; 3],
    gradients: impl Fn(&M, usize, usize) -> GradientsParams + Sync,
) {
    let gradients = |model: &M, rank, seed| (rank < 2).then(|| gradients(model, rank, seed));
    let plain = train(3, make, Overlap::off, gradients);
    let overlapped = train(3, make, || Overlap::new(Hooks::new()), gradients);
    for (one, other) in plain.iter().zip(&overlapped) {
        assert!(one.0.parameters == plain[0].0.parameters, "bitwise equal ranks");
        assert!(one.0 == other.0, "same bits with overlap");
        assert!(one.0.parameters != bits(&make()).parameters, "something was learned");
    }
    assert_eq!(overlapped.iter().map(|(_, is_on)| *is_on).collect::<Vec<_>>(), is_on);
}

#[test]
fn overlap_changes_no_bit_of_an_mlp_with_parameters_that_ranks_do_not_use() {
    // Layer 1 is used by rank 0 alone, and not always.
    assert_same_bits(Mlp::new, [true, true, false], |model, rank, seed| {
        let layers: &[usize] = if rank == 0 && seed % 3 > 0 { &[0, 1, 2] } else { &[0, 2] };
        model.gradients(layers, seed + 100 * rank)
    });
}

#[test]
fn overlap_changes_no_bit_of_a_cnn_with_batch_norm() {
    let make = || filled(ResNet::<B>::new([2, 2, 4, 4], &Default::default()));
    assert_same_bits(make, [true, true, false], |model, rank, seed| {
        let images = values(seed + 100 * rank, 2 * 3 * 8 * 8).reshape([2, 3, 8, 8]);
        GradientsParams::from_grads(model.forward(images).powi_scalar(2).mean().backward(), model)
    });
}

#[test]
fn a_step_with_several_backward_passes_takes_the_plain_path_and_the_other_ranks_need_not() {
    assert_same_bits(Mlp::new, [true, false, false], |model, rank, seed| {
        let first = model.gradients(&[0, 1, 2], seed + 100 * rank);
        if rank == 0 {
            return first;
        }
        let mut sums = GradientsAccumulator::new();
        sums.accumulate(model, first);
        sums.accumulate(model, model.gradients(&[0, 1, 2], seed));
        sums.grads()
    });
}

#[test]
fn a_step_that_is_no_longer_fit_for_hooks_is_an_error_on_every_rank() {
    let errors = each_rank(2, |communicator| {
        let rank = communicator.rank();
        let model = Mlp::new();
        let mut step = TrainingStep::<B>::new(communicator, &model, options()).unwrap();
        let mut overlap = Overlap::with(&AnyHooks::of::<B>());
        for window in 0.. {
            let run = |model: &Mlp<B>| {
                let mut gradients = model.gradients(&[0, 1, 2], window);
                if window == 5 && rank == 1 {
                    gradients.remove::<Flex, 2>(model.layers[0].weight.id);
                }
                (gradients, ())
            };
            if let Err(error) = overlap.micro_step(&mut step, &model, 1.0, run).and_then(|()| step.finish()) {
                assert_eq!(window, 5);
                return error.to_string();
            }
        }
        unreachable!("the loop has no end")
    });
    assert!(errors[0].contains("rank 1: the step gives other gradients for 1 parameters"), "{}", errors[0]);
    assert!(errors[1].contains("rank 1: the step gives other gradients for 1 parameters"), "{}", errors[1]);
}

#[test]
fn overlap_and_synchronised_batch_norm_do_not_wait_for_each_other() {
    #[derive(Module, Debug)]
    struct Net<B: Backend> {
        linear: Linear<B>,
        norm: SyncBatchNorm<B>,
    }

    let train = |overlap: fn() -> Overlap<B>| {
        let num_ranks = NonZeroUsize::new(3).unwrap();
        let own = ThreadCommunicator::group(num_ranks, Duration::from_secs(10));
        let own = Mutex::new(own.into_iter().map(Some).collect::<Vec<_>>());
        each_rank(num_ranks.get(), |communicator| {
            let (rank, mut overlap) = (communicator.rank(), overlap());
            let layers = own.lock().unwrap()[rank].take().unwrap();
            let device = Default::default();
            let mut model = filled(Net::<B> {
                linear: LinearConfig::new(4, 3).init(&device),
                norm: SyncBatchNorm::new(BatchNormConfig::new(3).init(&device), &SyncGroup::new::<B>(Arc::new(layers))),
            });
            let mut step = TrainingStep::new(communicator, &model, options()).unwrap();
            let mut optimizer = AdamConfig::new().init::<B, Net<B>>();
            for window in 0..50 {
                let run = |model: &Net<B>| {
                    let input = values(window + 100 * rank, 4 * (rank + 1)).reshape([rank + 1, 4]);
                    let output = model.norm.forward(model.linear.forward(input)).powi_scalar(3);
                    (GradientsParams::from_grads(output.mean().backward(), model), ())
                };
                overlap.micro_step(&mut step, &model, rank as f64 + 1.0, run).unwrap();
                let reduced = step.finish().unwrap().unwrap();
                model = step.settle(optimizer.step(0.01, model, reduced.gradients)).unwrap();
            }
            bits(&model)
        })
    };
    let (plain, overlapped) = (train(Overlap::off), train(|| Overlap::new(Hooks::new())));
    assert!(plain.iter().chain(&overlapped).all(|bits| *bits == plain[0]), "bitwise equal ranks, same bits");
}

#[test]
fn hooks_of_another_backend_leave_overlap_off() {
    let hooks = AnyHooks::of::<Autodiff<Flex, BalancedCheckpointing>>();
    assert_eq!(format!("{:?}", Overlap::<B>::with(&hooks)), format!("{:?}", Overlap::<B>::off()));
}
