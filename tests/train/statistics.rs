//! Batch statistics over ranks, against one device with the global batch.

use std::{
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Duration,
};

use bonfire::{
    collectives::{Communicator, Counting, ThreadCommunicator, run_ranks},
    train::{LossWeight, SyncBatchNorm, SyncGroup, TrainError},
};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, Param},
    nn::{BatchNorm, BatchNormConfig},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{Tensor, TensorData},
};
use burn_flex::Flex;

type B = Autodiff<Flex>;

const TIMEOUT: Duration = Duration::from_secs(10);

fn ranks<R: Send>(world_size: usize, body: impl Fn(Arc<dyn Communicator>) -> R + Sync) -> Vec<R> {
    run_ranks(NonZeroUsize::new(world_size).unwrap(), TIMEOUT, |communicator| body(Arc::new(communicator)))
}

fn column(values: &[f32]) -> Tensor<B, 2> {
    Tensor::<B, 1>::from_floats(values, &Default::default()).reshape([values.len(), 1])
}

fn values<const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

fn batch_norm(num_features: usize) -> BatchNorm<B> {
    BatchNormConfig::new(num_features).init(&Default::default())
}

fn assert_near(left: &[f32], right: &[f32]) {
    assert_eq!(left.len(), right.len());
    for (left_one, right_one) in left.iter().zip(right) {
        assert!((left_one - right_one).abs() < 1e-3, "{left:?} is not {right:?}");
    }
}

/// CASES 12
#[test]
fn synchronised_batch_norm_does_not_ignore_counts() {
    let shards: [&[f32]; 2] = [&[1.0, 2.0, 3.0], &[10.0]];
    let statistics = ranks(2, |communicator| {
        let input = column(shards[communicator.rank()]);
        let norm = BatchNormConfig::new(1).with_momentum(1.0).init(&Default::default());
        let norm = SyncBatchNorm::new(norm, &SyncGroup::new::<B>(communicator));
        let _ = norm.forward(input);
        let norm = norm.into_batch_norm();
        [values(norm.running_mean.value_sync())[0], values(norm.running_var.value_sync())[0]]
    });
    assert_eq!(statistics, [[4.0, 12.5]; 2]);
}

/// CASES 43
#[test]
fn batch_norm_is_over_all_ranks_and_not_per_replica() {
    let shards: [&[f32]; 2] = [&[1.0, 2.0], &[6.0]];
    let results = ranks(2, |communicator| {
        let input = column(shards[communicator.rank()]);
        let norm = SyncBatchNorm::new(batch_norm(1), &SyncGroup::new::<B>(communicator));
        let output = values(norm.forward(input));
        let norm = norm.into_batch_norm();
        (output, values(norm.running_mean.value_sync())[0], values(norm.running_var.value_sync())[0])
    });
    assert_near(&[results[0].0.as_slice(), &results[1].0].concat(), &[-0.926, -0.463, 1.389]);
    for (_, mean, variance) in results {
        assert_near(&[mean, variance], &[0.3, 1.36667]);
    }
}

/// CASES 44
#[test]
fn a_batch_of_one_over_two_ranks_gives_no_nan() {
    for is_run_with_nothing in [true, false] {
        let results = ranks(2, |communicator| {
            let rank = communicator.rank();
            let group = SyncGroup::new::<B>(communicator);
            let norm = SyncBatchNorm::new(batch_norm(1), &group);
            if rank == 1 && !is_run_with_nothing {
                group.stand_in().unwrap();
                return None;
            }
            let input = if rank == 0 { column(&[5.0]) } else { Tensor::zeros([0, 1], &Default::default()) };
            let input = input.require_grad();
            let output = norm.forward(input.clone());
            let gradients = output.clone().sum().backward();
            if !is_run_with_nothing {
                group.end_pass().unwrap();
            }
            let norm = norm.into_batch_norm();
            let gradient = input.grad(&gradients).unwrap().into_data().to_vec::<f32>().unwrap();
            let statistics = [values(norm.running_mean.value_sync())[0], values(norm.running_var.value_sync())[0]];
            Some((values(output), gradient, statistics))
        });
        assert_eq!(results[0], Some((vec![0.0], vec![0.0], [0.5, 0.9])));
        assert_eq!(results[1], is_run_with_nothing.then_some((vec![], vec![], [0.5, 0.9])));
    }
}

/// What one device or all ranks together make of a batch: outputs and gradients.
#[derive(Debug)]
struct Outcome {
    output: Vec<f32>,
    input_gradient: Vec<f32>,
    gamma_gradient: Vec<f32>,
    beta_gradient: Vec<f32>,
    running_mean: Vec<f32>,
    running_variance: Vec<f32>,
}

fn batch() -> Tensor<B, 3> {
    let values: Vec<f32> = (0..9 * 2 * 3).map(|index| ((index * index) as f32).sin() * 3.0 + 7.0).collect();
    Tensor::<B, 1>::from_floats(values.as_slice(), &Default::default()).reshape([9, 2, 3])
}

/// How a loss is made of those of the items.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    Mean,
    Sum,
}

/// Of something in which no item, channel or position is like another.
fn loss(output: Tensor<B, 3>, first: usize, kind: Loss) -> Tensor<B, 1> {
    let [num_items, ..] = output.dims();
    let factors: Vec<f32> = (first * 6..(first + num_items) * 6).map(|index| (index as f32).cos()).collect();
    let factors = Tensor::<B, 1>::from_floats(factors.as_slice(), &Default::default()).reshape([num_items, 2, 3]);
    let sum = (output.clone() * output * factors).sum();
    if kind == Loss::Mean { sum / num_items as f32 } else { sum }
}

fn parameterised() -> BatchNorm<B> {
    let mut norm = batch_norm(2);
    norm.gamma = Param::from_data([1.5, -0.5], &Default::default());
    norm.beta = Param::from_data([0.25, 2.0], &Default::default());
    norm
}

/// Two layers, so that gradients go through one to the other.
fn outcome(
    (input, first): (Tensor<B, 3>, usize),
    kind: Loss,
    norms: &[BatchNorm<B>; 2],
    forward: impl Fn(usize, Tensor<B, 3>) -> Tensor<B, 3>,
) -> Outcome {
    let input = input.require_grad();
    let output = forward(1, forward(0, input.clone()).tanh());
    let gradients = loss(output.clone(), first, kind).backward();
    let to_vec = |data: TensorData| data.to_vec::<f32>().unwrap();
    let both = |of: fn(&BatchNorm<B>) -> Tensor<B, 1>| {
        norms.iter().flat_map(|norm| to_vec(of(norm).grad(&gradients).unwrap().into_data())).collect()
    };
    Outcome {
        output: values(output),
        input_gradient: to_vec(input.grad(&gradients).unwrap().into_data()),
        gamma_gradient: both(|norm| norm.gamma.val()),
        beta_gradient: both(|norm| norm.beta.val()),
        running_mean: norms.iter().flat_map(|norm| values(norm.running_mean.value_sync())).collect(),
        running_variance: norms.iter().flat_map(|norm| values(norm.running_var.value_sync())).collect(),
    }
}

/// Checks ranks with these items each against one device with all nine.
fn assert_parity(shares: &[usize], kind: Loss) {
    let norms = [parameterised(), parameterised()];
    let whole = outcome((batch(), 0), kind, &norms, |index, x| norms[index].forward(x));
    let parts = ranks(shares.len(), |communicator| {
        let rank = communicator.rank();
        let first: usize = shares[..rank].iter().sum();
        let input = batch().slice_dim(0, first..first + shares[rank]);
        let group = SyncGroup::new::<B>(communicator);
        if kind == Loss::Sum {
            group.weigh_loss(LossWeight::Of(1.0));
        }
        let norms = [parameterised(), parameterised()];
        let synchronised = norms.each_ref().map(|norm| SyncBatchNorm::new(norm.clone(), &group));
        outcome((input, first), kind, &norms, |index, x| synchronised[index].forward(x))
    });
    let weight = |share: usize| if kind == Loss::Mean { share as f32 / 9.0 } else { 1.0 };
    let weighted = parts.iter().zip(shares).map(|(part, &share)| (part, weight(share)));
    let summed = |of: fn(&Outcome) -> &Vec<f32>| -> Vec<f32> {
        let add = |sums: Vec<f32>, (part, weight): (&Outcome, f32)| {
            sums.iter().zip(of(part)).map(|(sum, x)| sum + x * weight).collect()
        };
        weighted.clone().fold(vec![0.0; 4], add)
    };
    let output: Vec<f32> = parts.iter().flat_map(|part| part.output.clone()).collect();
    let scaled = |(part, weight): (&Outcome, f32)| part.input_gradient.iter().map(|x| x * weight).collect::<Vec<_>>();
    let input_gradient: Vec<f32> = weighted.clone().flat_map(scaled).collect();
    assert_close(&output, &whole.output);
    assert_close(&input_gradient, &whole.input_gradient);
    assert_close(&summed(|part| &part.gamma_gradient), &whole.gamma_gradient);
    assert_close(&summed(|part| &part.beta_gradient), &whole.beta_gradient);
    for part in &parts {
        assert_close(&part.running_mean, &whole.running_mean);
        assert_close(&part.running_variance, &whole.running_variance);
        assert_eq!(part.running_mean, parts[0].running_mean);
        assert_eq!(part.running_variance, parts[0].running_variance);
    }
}

/// Up to what sums of a batch in another order, in f32 and through two layers, make of the largest.
fn assert_close(left: &[f32], right: &[f32]) {
    assert_eq!(left.len(), right.len());
    let largest = right.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    for (x, expected) in left.iter().zip(right) {
        assert!((x - expected).abs() <= 2e-5 * largest.max(1.0), "{left:?} is not {right:?}");
    }
}

#[test]
fn outputs_gradients_and_statistics_are_those_of_one_device_for_any_shares() {
    for shares in [&[9][..], &[4, 5], &[8, 1], &[2, 3, 4], &[1, 1, 1, 6], &[9, 0], &[0, 4, 5, 0]] {
        assert_parity(shares, Loss::Mean);
        assert_parity(shares, Loss::Sum);
    }
}

#[test]
fn a_large_mean_does_not_swallow_the_variance() {
    let shards: [&[f32]; 2] = [&[10_000.0, 10_001.0, 10_002.0], &[10_006.0]];
    let variances = ranks(2, |communicator| {
        let input = column(shards[communicator.rank()]);
        let norm = BatchNormConfig::new(1).with_momentum(1.0).init(&Default::default());
        let norm = SyncBatchNorm::new(norm, &SyncGroup::new::<B>(communicator));
        let _ = norm.forward(input);
        values(norm.into_batch_norm().running_var.value_sync())[0]
    });
    assert_near(&variances, &[5.1875; 2]);
}

#[test]
fn a_layer_costs_one_all_reduce_forward_and_one_backward() {
    let communicators = ThreadCommunicator::group(NonZeroUsize::MIN, TIMEOUT);
    let counting = Counting::new(communicators.into_iter().next().unwrap());
    let counts = counting.counts();
    let norm = SyncBatchNorm::new(batch_norm(1), &SyncGroup::new::<B>(Arc::new(counting)));
    let output = norm.forward(column(&[1.0, 2.0]).require_grad());
    assert_eq!(counts.reset().to_string(), "1 all_reduce (56 bytes)");
    output.sum().backward();
    assert_eq!(counts.reset().to_string(), "1 all_reduce (56 bytes)");
    let _ = norm.valid().forward(column(&[1.0]).inner());
    assert_eq!(counts.reset().to_string(), "nothing");
}

#[test]
fn records_go_from_batch_norm_to_its_synchronised_form_and_back() {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
    let trained = parameterised();
    let _ = trained.forward(batch());
    let bytes = Recorder::<B>::record(&recorder, trained.clone().into_record(), ()).unwrap();
    let group = SyncGroup::new::<B>(Arc::new(ThreadCommunicator::group(NonZeroUsize::MIN, TIMEOUT).remove(0)));
    let record = Recorder::<B>::load(&recorder, bytes.clone(), &Default::default()).unwrap();
    let synchronised = SyncBatchNorm::new(batch_norm(2), &group).load_record(record);
    let expected = values(Tensor::<B, 3>::from_inner(trained.valid().forward(batch().inner())));
    let evaluated = values(Tensor::<B, 3>::from_inner(synchronised.valid().forward(batch().inner())));
    assert_eq!(evaluated, expected);
    let again = Recorder::<B>::record(&recorder, synchronised.into_record(), ()).unwrap();
    assert_eq!(again, bytes);
}

#[test]
fn a_layer_survives_evaluation_and_shows_what_it_is() {
    let group = SyncGroup::new::<B>(Arc::new(ThreadCommunicator::group(NonZeroUsize::MIN, TIMEOUT).remove(0)));
    let norm = SyncBatchNorm::new(parameterised(), &group);
    let shown = "SyncBatchNorm {num_features: 2, momentum: 0.1, epsilon: 0.00001, world_size: 1, params: 8}";
    assert_eq!(norm.to_string(), shown);
    let again: SyncBatchNorm<B> = norm.valid().train::<B>();
    assert_close(&values(again.forward(batch())), &values(parameterised().forward(batch())));
}

#[test]
fn a_rank_without_items_that_does_not_stand_in_is_named_on_the_others() {
    let timeout = Duration::from_millis(300);
    let errors = run_ranks(NonZeroUsize::new(3).unwrap(), timeout, |communicator| {
        let communicator: Arc<dyn Communicator> = Arc::new(communicator);
        let group = SyncGroup::new::<B>(communicator.clone());
        let norm = SyncBatchNorm::new(batch_norm(1), &group);
        if communicator.rank() == 1 {
            thread::sleep(2 * timeout);
            return String::new();
        }
        norm.try_forward(column(&[1.0])).unwrap_err().to_string()
    });
    for rank in [0, 2] {
        assert!(errors[rank].contains("layer 0 forward") && errors[rank].contains("stand_in"), "{}", errors[rank]);
        assert!(errors[rank].contains("ranks [1] did not arrive"), "{}", errors[rank]);
    }
}

#[test]
fn ranks_at_different_layers_are_an_error_on_every_rank() {
    let errors = ranks(2, |communicator| {
        let rank = communicator.rank();
        let group = SyncGroup::new::<B>(communicator);
        let norms = [0, 1].map(|_| SyncBatchNorm::new(batch_norm(1), &group));
        norms[rank].try_forward(column(&[1.0])).unwrap_err()
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let expected = format!("layer {rank} forward");
        assert!(matches!(error, TrainError::PlacesDiffer { at, .. } if at == expected));
    }
}

#[test]
fn a_rank_that_ended_its_pass_while_another_is_in_a_layer_is_an_error_on_every_rank() {
    let errors = ranks(3, |communicator| {
        let rank = communicator.rank();
        let group = SyncGroup::new::<B>(communicator);
        let norm = SyncBatchNorm::new(batch_norm(1), &group);
        match rank {
            0 => norm.try_forward(column(&[1.0])).map(|_| ()).unwrap_err(),
            1 => group.end_pass().unwrap_err(),
            _ => group.stand_in().unwrap_err(),
        }
    });
    assert!(errors.iter().all(|error| matches!(error, TrainError::PlacesDiffer { .. })));
}

#[test]
fn a_model_of_another_backend_than_the_groups_is_an_error() {
    type Other = Autodiff<Flex, burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing>;
    let group = SyncGroup::new::<B>(Arc::new(ThreadCommunicator::group(NonZeroUsize::MIN, TIMEOUT).remove(0)));
    let norm = SyncBatchNorm::<Other>::new(BatchNormConfig::new(1).init(&Default::default()), &group);
    let error = norm.try_forward(Tensor::<Other, 2>::zeros([1, 1], &Default::default())).unwrap_err();
    assert!(matches!(error, TrainError::SyncBackend { .. }), "{error}");
}

/// A leaf of its own: burn-autodiff 0.21 loses gradients where one leaf is registered twice.
fn leaf<const D: usize>(tensor: &Tensor<B, D>) -> Tensor<B, D> {
    Tensor::from_inner(tensor.clone().inner()).require_grad()
}

#[test]
fn threads_with_another_backward_pass_between_train_as_one_does() {
    let train = |world_size: usize| {
        let last = ranks(world_size, |communicator| {
            let (rank, share) = (communicator.rank(), 8 / world_size);
            let group = SyncGroup::new::<B>(communicator);
            let norms = [0, 1, 2].map(|_| SyncBatchNorm::new(parameterised(), &group));
            let input = batch().slice_dim(0, share * rank..share * (rank + 1));
            let mut last = Vec::new();
            for step in 0..100 {
                let between = leaf(&input);
                let start = leaf(&input);
                let mut x = start.clone() * (1.0 + step as f32);
                for norm in &norms {
                    x = norm.forward(x).tanh();
                }
                between.exp().sum().backward();
                group.align().unwrap();
                let gradients = (x.powi_scalar(3).sum() / share as f32).backward();
                last = values(Tensor::<B, 3>::from_inner(start.grad(&gradients).unwrap() * (share as f32)));
            }
            last
        });
        last.concat()
    };
    assert_close(&train(4), &train(1));
}

#[test]
fn threads_that_do_not_align_get_an_error_that_says_so() {
    let timeout = Duration::from_millis(500);
    let panics = run_ranks(NonZeroUsize::new(2).unwrap(), timeout, |communicator| {
        let rank = communicator.rank();
        let group = SyncGroup::new::<B>(Arc::new(communicator));
        let norm = SyncBatchNorm::new(parameterised(), &group);
        let output = norm.forward(leaf(&batch()));
        if rank == 1 {
            // Rank 0 is in its backward pass by now.
            thread::sleep(timeout / 2);
            leaf(&batch()).exp().sum().backward();
        }
        let backward = AssertUnwindSafe(|| output.sum().backward());
        let panic = catch_unwind(backward).map(|_| ()).unwrap_err();
        panic.downcast_ref::<String>().unwrap().clone()
    });
    assert!(panics[0].contains("layer 0 backward") && panics[0].contains("ranks [1] did not arrive"), "{panics:?}");
    assert!(panics[0].contains("`align`") && panics[1].contains("ranks [1] did not arrive"), "{panics:?}");
}
