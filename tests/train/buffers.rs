//! Running statistics on several ranks.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use bonfire::{
    collectives::{Communicator, Counting, ThreadCommunicator, run_ranks},
    train::{BufferSync, SyncOptions, TrainError, TrainingStep, synchronise_buffers},
};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, Param, ParamId, RunningState, list_param_ids},
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, Optimizer, SgdConfig},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{DType, Int, Tensor, TensorData, backend::Backend},
};
use burn_flex::Flex;

use crate::{models::filled, step::each_rank};

type B = Autodiff<Flex>;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    linear: Linear<B>,
    norm: BatchNorm<B>,
    output: Linear<B>,
}

impl Net<B> {
    fn new() -> Self {
        let device = Default::default();
        filled(Self {
            linear: LinearConfig::new(3, 4).init(&device),
            norm: BatchNormConfig::new(4).init(&device),
            output: LinearConfig::new(4, 2).init(&device),
        })
    }

    fn loss(&self, input: Tensor<B, 2>) -> Tensor<B, 1> {
        self.output.forward(self.norm.forward(self.linear.forward(input))).powi_scalar(2).mean()
    }

    fn statistics(&self) -> [Vec<f32>; 2] {
        [&self.norm.running_mean, &self.norm.running_var].map(|state| to_vec(state.value_sync().into_data()))
    }

    /// What it says to the same input, whoever asks.
    fn evaluate(&self) -> Vec<u8> {
        let model = self.valid();
        let hidden = model.norm.forward(model.linear.forward(input(99, 5).inner()));
        model.output.forward(hidden).into_data().as_bytes().to_vec()
    }
}

fn to_vec(data: TensorData) -> Vec<f32> {
    data.to_vec().unwrap()
}

fn input(seed: usize, num_items: usize) -> Tensor<B, 2> {
    let value = |index: usize| ((index * 7 + seed * 31) as f32).sin() * (1.0 + seed as f32);
    let values: Vec<f32> = (0..num_items * 3).map(value).collect();
    Tensor::<B, 1>::from_floats(values.as_slice(), &Default::default()).reshape([num_items, 3])
}

/// Three steps on shards of their own, with as many items as the rank and one more.
fn trained(communicator: Arc<dyn Communicator>) -> Net<B> {
    let rank = communicator.rank();
    let model = Net::new();
    let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
    let mut model = step.synchronise(model).unwrap();
    let mut optimizer = SgdConfig::new().init();
    for index in 0..3 {
        let loss = model.loss(input(10 * rank + index, rank + 1));
        step.micro_step(GradientsParams::from_grads(loss.backward(), &model), rank as f64 + 1.0).unwrap();
        let window = step.finish().unwrap().unwrap();
        model = optimizer.step(0.05, model, window.gradients);
        model = step.settle(model).unwrap();
    }
    model
}

fn reloaded(model: &Net<B>) -> Net<B> {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
    let bytes = Recorder::<B>::record(&recorder, model.clone().into_record(), ()).unwrap();
    Net::new().load_record(Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap())
}

/// CASES 14
#[test]
fn running_statistics_do_not_differ_per_replica() {
    for sync in [BufferSync::Broadcast, BufferSync::Average] {
        let mut first = None;
        for _ in 0..100 {
            let evaluations = each_rank(3, |communicator| {
                let weight = communicator.rank() as f64 + 1.0;
                let model = trained(communicator.clone());
                let before = model.evaluate();
                let model = synchronise_buffers::<B, _>(model, &*communicator, sync, weight).unwrap();
                (before, model.evaluate(), reloaded(&model).evaluate())
            });
            let (_, expected, _) = evaluations[0].clone();
            assert!(evaluations.iter().any(|(before, ..)| *before != expected), "they differed before");
            for (_, evaluated, reloaded) in &evaluations {
                assert_eq!((evaluated, reloaded), (&expected, &expected));
            }
            assert_eq!(first.get_or_insert_with(|| expected.clone()), &expected);
        }
    }
}

fn counting_ranks<R: Send>(num: usize, body: impl Fn(Arc<Counting<ThreadCommunicator>>) -> R + Sync) -> Vec<R> {
    let num = NonZeroUsize::new(num).unwrap();
    run_ranks(num, Duration::from_secs(10), |communicator| body(Arc::new(Counting::new(communicator))))
}

#[test]
fn each_rank_keeps_its_own_statistics_if_it_is_told_to() {
    let evaluations = counting_ranks(2, |counting| {
        let model = trained(counting.clone());
        let before = counting.counts().tally();
        let model = synchronise_buffers::<B, _>(model, &*counting, BufferSync::Off, 1.0).unwrap();
        assert_eq!((counting.counts().tally() - before).to_string(), "nothing");
        model.evaluate()
    });
    assert_ne!(evaluations[0], evaluations[1]);
}

fn with_mean(value: f32) -> Net<B> {
    let model = Net::new();
    let mean = Tensor::full([4], value, &Default::default());
    let norm = BatchNorm { running_mean: RunningState::new(mean), ..model.norm.clone() };
    Net { norm, ..model }
}

#[test]
fn the_mean_of_statistics_is_weighted_by_items() {
    let means = each_rank(2, |communicator| {
        let (value, weight) = if communicator.rank() == 0 { (1.0, 3.0) } else { (5.0, 1.0) };
        let model = synchronise_buffers::<B, _>(with_mean(value), &*communicator, BufferSync::Average, weight);
        model.unwrap().statistics()
    });
    assert_eq!(means, [[vec![2.0; 4], vec![1.0; 4]], [vec![2.0; 4], vec![1.0; 4]]]);
}

#[test]
fn a_rank_without_items_does_not_count() {
    for (sync, expected) in [(BufferSync::Broadcast, 1.0), (BufferSync::Average, 2.0)] {
        let means = each_rank(3, |communicator| {
            let (value, weight) = [(f32::NAN, 0.0), (1.0, 2.0), (3.0, 2.0)][communicator.rank()];
            synchronise_buffers::<B, _>(with_mean(value), &*communicator, sync, weight).unwrap().statistics()
        });
        assert!(means.iter().all(|[mean, _]| *mean == [expected; 4]), "{means:?}");
    }
}

#[test]
fn without_any_items_the_statistics_are_rank_0s() {
    for sync in [BufferSync::Broadcast, BufferSync::Average] {
        let means = each_rank(2, |communicator| {
            let model = with_mean(communicator.rank() as f32 + 7.0);
            synchronise_buffers::<B, _>(model, &*communicator, sync, 0.0).unwrap().statistics()
        });
        assert!(means.iter().all(|[mean, _]| *mean == [7.0; 4]), "{means:?}");
    }
}

#[test]
fn an_update_that_waits_for_the_next_forward_pass_counts() {
    let statistics = each_rank(2, |communicator| {
        let model = Net::new();
        let _ = model.loss(input(communicator.rank(), 4));
        let model = synchronise_buffers::<B, _>(model, &*communicator, BufferSync::Broadcast, 4.0).unwrap();
        model.statistics()
    });
    let alone = Net::new();
    let _ = alone.loss(input(0, 4));
    assert_eq!(statistics, [alone.statistics(), alone.statistics()]);
}

#[test]
fn buffers_that_are_equal_are_compared_and_not_sent() {
    let tallies = counting_ranks(2, |counting| {
        let model = Net::new();
        let ids = list_param_ids(&model);
        let model = synchronise_buffers::<B, _>(model, &*counting, BufferSync::Broadcast, 1.0).unwrap();
        assert_eq!(list_param_ids(&model), ids);
        counting.counts().tally().to_string()
    });
    // The weight and two hashes, of each rank.
    assert_eq!(tallies, ["1 all_gather (48 bytes)"; 2]);
}

#[test]
fn parameters_are_left_alone_and_counters_are_broadcast() {
    #[derive(Module, Debug)]
    struct Counter<B: Backend> {
        weight: Param<Tensor<B, 1>>,
        frozen: Param<Tensor<B, 1>>,
        count: Param<Tensor<B, 1, Int>>,
    }

    let device = Default::default();
    let results = each_rank(2, |communicator| {
        let value = communicator.rank() as f32;
        let count = TensorData::from([(1i64 << 53) + 1 + communicator.rank() as i64]);
        let model = Counter::<B> {
            weight: Param::from_data([value], &device),
            frozen: Param::from_data([value], &device).set_require_grad(false),
            count: Param::initialized(ParamId::new(), Tensor::from_data(count, (&device, DType::I64))),
        };
        let model = synchronise_buffers::<B, _>(model, &*communicator, BufferSync::Average, 1.0).unwrap();
        let count = model.count.val().into_data().to_vec::<i64>().unwrap();
        (to_vec(model.weight.val().into_data()), to_vec(model.frozen.val().into_data()), count)
    });
    for (rank, result) in results.into_iter().enumerate() {
        assert_eq!(result, (vec![rank as f32], vec![0.5], vec![(1 << 53) + 1]));
    }
}

#[test]
fn a_weight_that_no_items_have_is_an_error_on_every_rank() {
    let errors = each_rank(2, |communicator| {
        let weight = if communicator.rank() == 1 { f64::NAN } else { 1.0 };
        synchronise_buffers::<B, _>(Net::new(), &*communicator, BufferSync::Average, weight).map(|_| ()).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, TrainError::Weight { rank: 1, .. })), "{errors:?}");
}

#[test]
fn ranks_with_different_buffers_are_an_error_on_every_rank() {
    let errors = each_rank(2, |communicator: Arc<ThreadCommunicator>| {
        let sync = BufferSync::Broadcast;
        if communicator.rank() == 0 {
            synchronise_buffers::<B, _>(Net::new(), &*communicator, sync, 1.0).map(|_| ()).unwrap_err()
        } else {
            let model: Linear<B> = LinearConfig::new(1, 1).init(&Default::default());
            synchronise_buffers::<B, _>(model, &*communicator, sync, 1.0).map(|_| ()).unwrap_err()
        }
    });
    assert!(errors.iter().all(|error| matches!(error, TrainError::Collective(_))), "{errors:?}");
}
