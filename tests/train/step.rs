//! Faults that users met between backward and the optimizer, each with its right value.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use bonfire::{
    collectives::{Collective, Communicator, Counting, ThreadCommunicator, run_ranks},
    train::{ReduceDType, Reduction, SyncOptions, TrainError, TrainingStep, parameters},
};
use burn::{
    backend::Autodiff,
    module::{Module, Param, ParamId},
    optim::{GradientsParams, Optimizer, SgdConfig, decay::WeightDecayConfig},
    tensor::{DType, Tensor, TensorData, backend::Backend},
};
use burn_flex::Flex;

type B = Autodiff<Flex>;

/// One-dimensional parameters, named by their index.
#[derive(Module, Debug)]
pub(super) struct Values<B: Backend> {
    values: Vec<Param<Tensor<B, 1>>>,
}

impl Values<B> {
    pub(super) fn new(values: &[&[f32]]) -> Self {
        Self::with_dtype(values, DType::F32)
    }

    fn with_dtype(values: &[&[f32]], dtype: DType) -> Self {
        let device = Default::default();
        let param = |values: &&[f32]| {
            let tensor = Tensor::<B, 1>::from_data(TensorData::from(*values), (&device, dtype));
            Param::initialized(ParamId::new(), tensor.require_grad())
        };
        Self { values: values.iter().map(param).collect() }
    }

    fn ones(lengths: &[usize]) -> Self {
        let ones: Vec<Vec<f32>> = lengths.iter().map(|&length| vec![1.0; length]).collect();
        Self::new(&ones.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    /// Gradients as a backward pass would give them; none for an unused parameter.
    pub(super) fn gradients(&self, gradients: &[Option<&[f32]>]) -> GradientsParams {
        let mut params = GradientsParams::new();
        for (param, gradient) in self.values.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                let dtype = param.val().dtype();
                let gradient = TensorData::from(*gradient);
                params.register(param.id, Tensor::<Flex, 1>::from_data(gradient, (&Default::default(), dtype)));
            }
        }
        params
    }

    /// What a window holds for each parameter.
    pub(super) fn read(&self, gradients: &GradientsParams) -> Vec<Option<Vec<f32>>> {
        let read = |param: &Param<Tensor<B, 1>>| {
            gradients.get::<Flex, 1>(param.id).map(|gradient| gradient.into_data().iter::<f32>().collect())
        };
        self.values.iter().map(read).collect()
    }

    /// The first element of the first parameter.
    pub(super) fn first(&self) -> f32 {
        self.values[0].val().into_data().iter::<f32>().next().expect("an element")
    }

    pub(super) fn bits(&self) -> Vec<TensorData> {
        self.values.iter().map(|param| param.val().into_data()).collect()
    }
}

pub(super) fn each_rank<R: Send>(num: usize, body: impl Fn(Arc<ThreadCommunicator>) -> R + Sync) -> Vec<R> {
    let num = NonZeroUsize::new(num).expect("at least one rank");
    run_ranks(num, Duration::from_secs(10), |communicator| body(Arc::new(communicator)))
}

/// The window of one micro step on each rank, of (gradient, weight).
fn one_window(steps: &[(&[f32], f64)], options: &SyncOptions, dtype: DType) -> Vec<Option<Vec<f32>>> {
    each_rank(steps.len(), |communicator| {
        let (gradient, weight) = steps[communicator.rank()];
        let model = Values::with_dtype(&[&vec![0.0; gradient.len()]], dtype);
        let mut step = TrainingStep::new(communicator, &model, options.clone()).unwrap();
        step.micro_step(model.gradients(&[Some(gradient)]), weight).unwrap();
        step.finish().unwrap().and_then(|window| model.read(&window.gradients)[0].clone())
    })
}

fn sgd(weight_decay: Option<f32>) -> impl Optimizer<Values<B>, B> {
    SgdConfig::new().with_weight_decay(weight_decay.map(WeightDecayConfig::new)).init()
}

/// `mean((w * x - 2 * x)^2)` and its gradient.
fn line(model: &Values<B>, x: &[f32]) -> (f32, GradientsParams) {
    let x = Tensor::<B, 1>::from_floats(x, &Default::default());
    let loss = (model.values[0].val() * x.clone() - x * 2.0).square().mean();
    (loss.clone().into_scalar(), GradientsParams::from_grads(loss.backward(), model))
}

/// CASES 3
#[test]
fn a_mean_of_means_with_unequal_shards_is_weighted_by_items() {
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let weights = each_rank(2, |communicator| {
        let x = if communicator.rank() == 0 { &x[..5] } else { &x[5..] };
        let mut model = Values::new(&[&[0.0]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        step.micro_step(line(&model, x).1, x.len() as f64).unwrap();
        let window = step.finish().unwrap().unwrap();
        assert_eq!(window.weight, 8.0);
        let gradient = model.read(&window.gradients)[0].clone().unwrap()[0];
        assert!((gradient + 102.0).abs() < 1e-4, "{gradient}");
        model = sgd(None).step(0.02, model, window.gradients);
        step.settle(model).unwrap().values[0].val().into_scalar()
    });
    assert!((weights[0] - 2.04).abs() < 1e-6, "{weights:?}");
    assert_eq!(weights[0].to_bits(), weights[1].to_bits());
}

/// CASES 5
#[test]
fn the_tail_of_gradient_accumulation_is_the_true_mean_of_its_own_window() {
    for windows in each_rank(2, |communicator| {
        let rank = communicator.rank();
        let model = Values::new(&[&[0.0]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        let micro_gradients: Vec<f32> = (1..=10).map(|index| (index * (rank + 1)) as f32).collect();
        let windows: Vec<f32> = micro_gradients
            .chunks(4)
            .map(|window| {
                for gradient in window {
                    step.micro_step(model.gradients(&[Some(&[*gradient])]), 3.0).unwrap();
                }
                model.read(&step.finish().unwrap().unwrap().gradients)[0].clone().unwrap()[0]
            })
            .collect();
        assert_eq!(step.num_windows(), 3);
        windows
    }) {
        // Rank 1's gradients are twice rank 0's: the mean is 1.5 times rank 0's.
        assert_eq!(windows, [2.5 * 1.5, 6.5 * 1.5, 9.5 * 1.5]);
    }
}

/// CASES 6
#[test]
fn a_window_is_synchronised_once_and_not_at_every_micro_batch() {
    for (reduction, expected) in [(Reduction::Sum, 5.5), (Reduction::Mean, 2.75)] {
        for num_micro_steps in [2, 1] {
            let results = each_rank(2, |communicator| {
                let micro_gradients = [[1.0f32, 3.0], [2.0, 5.0]][communicator.rank()];
                let counting = Arc::new(Counting::new(communicator_of(communicator)));
                let model = Values::new(&[&[0.0], &[0.0, 0.0]]);
                let options = SyncOptions { reduction, ..SyncOptions::default() };
                let mut step = TrainingStep::new(counting.clone(), &model, options).unwrap();
                counting.counts().reset();
                for gradient in &micro_gradients[..num_micro_steps] {
                    step.micro_step(model.gradients(&[Some(&[*gradient])]), 1.0).unwrap();
                }
                assert_eq!(counting.counts().tally().total_calls(), 0, "nothing is sent within a window");
                let window = step.finish().unwrap().unwrap();
                let tally = counting.counts().tally();
                assert_eq!((tally.num_calls(Collective::AllReduce), tally.num_calls(Collective::AllGather)), (1, 1));
                assert_eq!(tally.total_calls(), 2, "{tally}");
                model.read(&window.gradients)[0].clone().unwrap()[0]
            });
            if num_micro_steps == 2 {
                assert_eq!(results, [expected; 2]);
            }
        }
    }
}

/// The communicator itself: `Counting` wants to own it.
fn communicator_of(communicator: Arc<ThreadCommunicator>) -> ThreadCommunicator {
    Arc::into_inner(communicator).expect("nobody else has it yet")
}

/// CASES 8
#[test]
fn a_parameter_that_no_rank_used_has_no_gradient_so_weight_decay_leaves_it() {
    let models = each_rank(2, |communicator| {
        let model = Values::new(&[&[1.0], &[1.0]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        step.micro_step(model.gradients(&[None, Some(&[1.0])]), 1.0).unwrap();
        let window = step.finish().unwrap().unwrap();
        assert_eq!(model.read(&window.gradients), [None, Some(vec![1.0])]);
        let model = sgd(Some(0.1)).step(0.1, model, window.gradients);
        step.settle(model).unwrap().bits()
    });
    assert_eq!(models[0][0], TensorData::from([1.0f32]), "not 0.99");
    assert_eq!(models[0], models[1]);
}

/// CASES 9
#[test]
fn a_parameter_that_only_some_ranks_used_gets_the_same_gradient_on_all() {
    let models = each_rank(2, |communicator| {
        let gradient = [Some(&[4.0f32][..]), None][communicator.rank()];
        let model = Values::new(&[&[1.0], &[1.0]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        step.micro_step(model.gradients(&[gradient, Some(&[1.0])]), 1.0).unwrap();
        let window = step.finish().unwrap().unwrap();
        assert_eq!(model.read(&window.gradients)[0], Some(vec![2.0]));
        let model = sgd(None).step(0.1, model, window.gradients);
        step.settle(model).unwrap().bits()
    });
    assert_eq!(models[0], models[1]);
}

/// CASES 11
#[test]
fn an_empty_shard_gives_no_nan_and_changes_nothing() {
    let whole = line(&Values::new(&[&[0.5]]), &[1.0, 2.0, 3.0]);
    assert!(whole.0.is_finite());
    let gradients = each_rank(4, |communicator| {
        let x = [&[1.0f32][..], &[2.0], &[3.0], &[]][communicator.rank()];
        let model = Values::new(&[&[0.5]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        let gradients = if x.is_empty() { model.gradients(&[Some(&[f32::NAN])]) } else { line(&model, x).1 };
        step.micro_step(gradients, x.len() as f64).unwrap();
        let window = step.finish().unwrap().unwrap();
        assert_eq!(window.weight, 3.0);
        model.read(&window.gradients)[0].clone().unwrap()[0]
    });
    // Of mean((w - 2)^2 * x^2) at w = 0.5: -3 * 14 / 3.
    assert!(gradients.iter().all(|gradient| (gradient + 14.0).abs() < 1e-5), "{gradients:?}");
}

#[test]
fn a_window_in_which_no_rank_has_an_item_has_no_gradient() {
    for windows in each_rank(3, |communicator| {
        let model = Values::new(&[&[0.5]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        step.micro_step(model.gradients(&[Some(&[f32::NAN])]), 0.0).unwrap();
        let empty = step.finish().unwrap();
        step.micro_step(model.gradients(&[Some(&[2.0])]), 1.0).unwrap();
        (empty.is_none(), model.read(&step.finish().unwrap().unwrap().gradients)[0].clone())
    }) {
        assert_eq!(windows, (true, Some(vec![2.0])));
    }
}

/// CASES 23
#[test]
fn a_sum_of_halves_does_not_overflow_and_a_mean_does_not_underflow() {
    let options = SyncOptions { reduce_dtype: ReduceDType::F16, ..SyncOptions::default() };
    for dtype in [DType::F32, DType::F16] {
        let many = |num: usize, value: f32| {
            let steps = vec![(value, 1.0); num];
            let views: Vec<(&[f32], f64)> = steps.iter().map(|(value, w)| (std::slice::from_ref(value), *w)).collect();
            one_window(&views, &options, dtype)[0].clone().unwrap()[0]
        };
        assert_eq!(many(2, 40000.0), 40000.0);
        assert!((many(8, 6e-8) - 5.96e-8).abs() < 1e-10, "{}", many(8, 6e-8));
        assert_eq!(many(64, 2000.0), 2000.0);
        // Unequal shares do not overflow either.
        let unequal = one_window(&[(&[60000.0], 7.0), (&[60000.0], 1.0)], &options, dtype)[0].clone().unwrap()[0];
        assert!((unequal / 60000.0 - 1.0).abs() < 1e-3, "{unequal}, to 11 bits");
    }
}

#[test]
fn halves_accumulate_without_overflow() {
    for reduce_dtype in [ReduceDType::F32, ReduceDType::F16] {
        let model = Values::with_dtype(&[&[0.0]], DType::F16);
        let options = SyncOptions { reduce_dtype, ..SyncOptions::default() };
        let gradients = each_rank(1, |communicator| {
            let mut step = TrainingStep::new(communicator, &model, options.clone()).unwrap();
            for _ in 0..64 {
                step.micro_step(model.gradients(&[Some(&[2000.0])]), 1.0).unwrap();
            }
            step.finish().unwrap().unwrap().gradients.remove::<Flex, 1>(model.values[0].id).unwrap().into_data()
        });
        assert_eq!(gradients[0], TensorData::from([2000.0f32]).convert_dtype(DType::F16));
    }
}

/// CASES 33
#[test]
fn models_that_differ_are_an_error_on_all_ranks_that_names_the_parameter() {
    for (others, expected) in [
        (
            &[2, 4][..],
            "parameter 1 of rank 1 is `values.1` (F32 [4], trained), of rank 0 `values.1` (F32 [3], trained)",
        ),
        (&[2], "parameter 1 of rank 1 is nothing, of rank 0 `values.1`"),
        (&[2, 3, 1], "parameter 2 of rank 1 is `values.2` (F32 [1], trained), of rank 0 nothing"),
        (&[3, 2], "parameter 0 of rank 1 is `values.0` (F32 [3], trained), of rank 0 `values.0` (F32 [2], trained)"),
    ] {
        for error in each_rank(3, |communicator| {
            let lengths = if communicator.rank() == 1 { others } else { &[2, 3] };
            TrainingStep::new(communicator, &Values::ones(lengths), SyncOptions::default()).err().unwrap().to_string()
        }) {
            assert!(error.contains(expected), "{error}");
        }
    }
}

/// CASES 35
#[test]
fn a_later_collective_does_not_return_an_earlier_ones_tensor() {
    for done in each_rank(2, |communicator| {
        let rank = communicator.rank() as f32;
        let model = Values::ones(&[1, 2, 1]);
        // A bucket for each parameter: three collectives back to back.
        let options = SyncOptions { first_bucket_cap_bytes: 0, bucket_cap_bytes: 0, ..SyncOptions::default() };
        let mut step = TrainingStep::new(communicator, &model, options).unwrap();
        for round in 0..1000 {
            let value = |first: f32| first + rank * 2.0 + (round % 7) as f32;
            let gradients = [&[value(2.0)][..], &[value(3.0), value(3.0)], &[value(1.0)]];
            step.micro_step(model.gradients(&gradients.map(Some)), 1.0).unwrap();
            let window = step.finish().unwrap().unwrap();
            let mean = |first: f32| first + 1.0 + (round % 7) as f32;
            let expected = [vec![mean(2.0)], vec![mean(3.0); 2], vec![mean(1.0)]];
            assert_eq!(model.read(&window.gradients), expected.map(Some), "round {round}");
        }
        step.num_windows()
    }) {
        assert_eq!(done, 1000);
    }
}

/// CASES 37
#[test]
fn mean_is_the_default_and_a_sum_must_be_asked_for() {
    for (options, expected) in
        [(SyncOptions::default(), -0.1), (SyncOptions { reduction: Reduction::Sum, ..SyncOptions::default() }, -0.2)]
    {
        for value in each_rank(2, |communicator| {
            let model = Values::new(&[&[0.0]]);
            let mut step = TrainingStep::new(communicator, &model, options.clone()).unwrap();
            step.micro_step(model.gradients(&[Some(&[1.0])]), 1.0).unwrap();
            let window = step.finish().unwrap().unwrap();
            sgd(None).step(0.1, model, window.gradients).values[0].val().into_scalar()
        }) {
            assert!((value - expected).abs() < 1e-7, "{value}");
        }
    }
}

/// CASES 45
#[test]
fn a_mean_of_shard_means_is_weighted() {
    // The means of 1..=3 and of 4 and 5.
    let means = one_window(&[(&[2.0], 3.0), (&[4.5], 2.0)], &SyncOptions::default(), DType::F32);
    for mean in means {
        let mean = mean.unwrap()[0];
        assert!((mean - 3.0).abs() < 1e-6, "{mean} and not 3.25");
    }
}

/// CASES 48
#[test]
fn parameters_of_size_0_and_as_many_rows_as_features_as_ranks_are_fine() {
    for gradients in each_rank(2, |communicator| {
        let rank = communicator.rank() as f32;
        let model = Values::ones(&[0, 2, 0]);
        assert_eq!(parameters::<B, _>(&model)[0].num_elements(), 0);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        let model = step.synchronise(model).unwrap();
        step.micro_step(model.gradients(&[Some(&[]), Some(&[rank, 2.0]), None]), 2.0).unwrap();
        model.read(&step.finish().unwrap().unwrap().gradients)
    }) {
        assert_eq!(gradients, [Some(vec![]), Some(vec![0.5, 2.0]), None]);
    }
}

#[test]
fn gradients_of_another_model_and_weights_that_no_items_have_are_errors() {
    for rank in each_rank(1, |communicator| {
        let model = Values::ones(&[1]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        for weight in [-1.0, f64::NAN, f64::INFINITY] {
            let error = step.micro_step(model.gradients(&[None]), weight).unwrap_err();
            assert!(matches!(error, TrainError::Weight { .. }), "{error}");
        }
        let other = Values::ones(&[1]);
        match step.micro_step(other.gradients(&[Some(&[1.0])]), 1.0) {
            Err(TrainError::UnknownGradients { rank, num_unknown: 1 }) => rank,
            other => panic!("{other:?}"),
        }
    }) {
        assert_eq!(rank, 0);
    }
}
