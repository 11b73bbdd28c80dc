//! What ends a window early, on every rank and in time; and the ways of training that are asked for.

use std::{
    num::NonZeroUsize,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bonfire::{
    collectives::{Communicator, Counting, ThreadCommunicator, run_ranks},
    train::{SyncOptions, TrainError, TrainingStep},
};
use burn::{
    backend::Autodiff,
    module::ParamId,
    optim::{Optimizer, SgdConfig},
    tensor::{Tensor, TensorData, backend::BackendTypes},
};
use burn_flex::Flex;

use crate::step::{Values, each_rank};

type B = Autodiff<Flex>;

fn started(communicator: Arc<ThreadCommunicator>, model: &Values<B>) -> TrainingStep<B> {
    TrainingStep::new(communicator, model, SyncOptions::default()).unwrap()
}

/// A gradient as a hook sees it.
fn primitive(values: &[f32]) -> <Flex as BackendTypes>::FloatTensorPrimitive {
    Tensor::<Flex, 1>::from_data(TensorData::from(values), &Default::default()).into_primitive().tensor()
}

#[test]
fn a_rank_that_ends_in_the_middle_of_a_window_is_an_error_on_the_others_and_hangs_nobody() {
    let begin = Instant::now();
    let errors = each_rank(3, |communicator| {
        let rank = communicator.rank();
        let model = Values::new(&[&[0.0; 4]]);
        let mut step = started(communicator, &model);
        step.micro_step(model.gradients(&[Some(&[1.0; 4])]), 1.0).unwrap();
        if rank == 1 {
            return None;
        }
        if rank == 2 {
            // Its gradients are on their way: others wait for the rest of them.
            step.overlapped(1.0).unwrap();
            return None;
        }
        Some(step.finish().unwrap_err().to_string())
    });
    let error = errors[0].as_ref().unwrap();
    assert!(error.contains("ended") || error.contains("in the middle of a window"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// CASES 39
#[test]
fn a_rank_that_skips_a_window_is_named_within_the_timeout() {
    let begin = Instant::now();
    let timeout = Duration::from_millis(200);
    let num = NonZeroUsize::new(3).unwrap();
    let errors = run_ranks(num, timeout, |communicator| {
        let rank = communicator.rank();
        let model = Values::new(&[&[0.0; 4]]);
        let mut step = started(Arc::new(communicator), &model);
        if rank == 1 {
            thread::sleep(Duration::from_secs(1));
        }
        step.finish().unwrap_err().to_string()
    });
    for error in &errors {
        assert!(error.contains("all_gather"), "{error}");
    }
    assert!(errors[0].contains("ranks [1] did not arrive"), "{}", errors[0]);
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_panic_of_the_thread_that_reduces_is_an_error_on_every_rank() {
    let errors = each_rank(2, |communicator| {
        let rank = communicator.rank();
        let model = Values::new(&[&[0.0; 4], &[0.0; 4]]);
        let mut step = started(communicator, &model);
        step.micro_step(model.gradients(&[Some(&[1.0; 4]), None]), 1.0).unwrap();
        let sink = step.overlapped(1.0).unwrap();
        // The sum of 4 and 3 values is no sum.
        let gradient = if rank == 1 { &[1.0; 3][..] } else { &[1.0; 4] };
        sink.ready(step.parameters()[0].id, primitive(gradient));
        let error = step.finish().unwrap_err();
        assert!(step.finish().is_err(), "and so is every later window");
        error
    });
    assert!(matches!(errors[1], TrainError::ReducerPanicked { rank: 1, .. }), "{}", errors[1]);
    assert!(errors[0].to_string().contains("rank 1: the thread that reduces gradients panicked"), "{}", errors[0]);
}

#[test]
fn a_gradient_that_does_not_fit_or_comes_twice_is_an_error_on_every_rank_that_names_the_parameter() {
    for (is_twice, expected) in [(false, "the gradient of parameter values.1 has 3 elements"), (true, "came twice")] {
        let errors = each_rank(2, |communicator| {
            let rank = communicator.rank();
            let model = Values::new(&[&[0.0; 4], &[0.0; 4]]);
            let mut step = started(communicator, &model);
            let sink = step.overlapped(1.0).unwrap();
            let id = step.parameters()[1].id;
            match (rank, is_twice) {
                (0, false) => sink.ready(id, primitive(&[1.0; 3])),
                (0, true) => {
                    sink.ready(id, primitive(&[1.0; 4]));
                    sink.ready(id, primitive(&[1.0; 4]));
                }
                _ => sink.ready(id, primitive(&[1.0; 4])),
            }
            step.finish().unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn what_a_hook_does_not_hand_over_is_reduced_afterwards() {
    for gradients in each_rank(2, |communicator| {
        let rank = communicator.rank() as f32;
        let model = Values::new(&[&[0.0], &[0.0], &[0.0], &[0.0]]);
        let mut step = started(communicator, &model);
        step.micro_step(model.gradients(&[Some(&[1.0 + rank]), Some(&[3.0]), None, None]), 1.0).unwrap();
        let sink = step.overlapped(1.0).unwrap();
        let ids: Vec<_> = step.parameters().iter().map(|parameter| parameter.id).collect();
        sink.ready(ids[0], primitive(&[1.0]));
        sink.ready(ids[2], primitive(&[6.0]));
        sink.ready(ParamId::new(), primitive(&[9.0]));
        model.read(&step.finish().unwrap().unwrap().gradients)
    }) {
        assert_eq!(gradients, [Some(vec![1.25]), Some(vec![1.5]), Some(vec![3.0]), None]);
    }
}

#[test]
fn nothing_else_may_begin_while_gradients_are_on_their_way() {
    for refused in each_rank(1, |communicator| {
        let model = Values::new(&[&[0.0]]);
        let mut step = started(communicator, &model);
        step.micro_step(model.gradients(&[Some(&[1.0])]), 1.0).unwrap();
        let refused = step.synchronise(model.clone()).unwrap_err();
        assert!(matches!(refused, TrainError::WindowOpen { call: "synchronise", .. }), "its gradients would be lost");
        step.overlapped(1.0).unwrap();
        let refused = step.micro_step(model.gradients(&[Some(&[1.0])]), 1.0).unwrap_err();
        assert!(matches!(step.overlapped(1.0).err().unwrap(), TrainError::WindowOpen { call: "overlapped", .. }));
        refused
    }) {
        assert!(matches!(refused, TrainError::WindowOpen { call: "micro_step", .. }), "{refused}");
    }
}

#[test]
fn a_step_that_is_dropped_between_windows_lets_go_of_the_communicator() {
    for is_alone in each_rank(2, |communicator| {
        let model = Values::new(&[&[0.0]]);
        let mut step = started(communicator.clone(), &model);
        step.finish().unwrap();
        drop(step);
        Arc::strong_count(&communicator) == 1
    }) {
        assert!(is_alone, "its thread has ended");
    }
}

#[test]
fn one_rank_takes_the_same_path_as_several() {
    let tallies = |num: usize| {
        let num = NonZeroUsize::new(num).unwrap();
        run_ranks(num, Duration::from_secs(10), |communicator| {
            let counting = Arc::new(Counting::new(communicator));
            let model = Values::new(&[&[0.0; 3], &[0.0; 5]]);
            let options = SyncOptions { first_bucket_cap_bytes: 0, ..SyncOptions::default() };
            let mut step = TrainingStep::<B>::new(counting.clone(), &model, options).unwrap();
            let mut model = step.synchronise(model).unwrap();
            let mut optimizer = SgdConfig::new().init();
            for _ in 0..3 {
                step.micro_step(model.gradients(&[Some(&[1.0; 3]), Some(&[1.0; 5])]), 2.0).unwrap();
                let window = step.finish().unwrap().unwrap();
                model = step.settle(optimizer.step(0.1, model, window.gradients)).unwrap();
            }
            let tally = counting.counts().tally();
            bonfire::collectives::Collective::ALL.map(|collective| tally.num_calls(collective))
        })
    };
    assert_eq!(tallies(1)[0], tallies(3)[2]);
}

#[test]
fn models_that_were_never_synchronised_are_found_after_the_first_window() {
    for error in each_rank(2, |communicator| {
        let model = Values::new(&[&[0.0], &[communicator.rank() as f32]]);
        let mut step = started(communicator, &model);
        step.micro_step(model.gradients(&[None, Some(&[1.0])]), 1.0).unwrap();
        step.finish().unwrap();
        step.settle(model).unwrap_err()
    }) {
        assert!(
            matches!(&error, TrainError::Drifted { parameter, drifted, .. } if parameter == "values.1" && *drifted == [1]),
            "{error}"
        );
    }
}

#[test]
fn a_model_that_drifts_is_found_at_the_next_check() {
    for found_after in each_rank(3, |communicator| {
        let rank = communicator.rank();
        let model = Values::new(&[&[0.0]]);
        let options = SyncOptions { check_every: NonZeroUsize::new(4), ..SyncOptions::default() };
        let mut step = TrainingStep::new(communicator, &model, options).unwrap();
        let mut model = step.synchronise(model).unwrap();
        let mut optimizer = SgdConfig::new().init();
        loop {
            step.micro_step(model.gradients(&[Some(&[1.0])]), 1.0).unwrap();
            let window = step.finish().unwrap().unwrap();
            // From the third window on, one rank has a learning rate of its own.
            let rate = if rank == 2 && step.num_windows() > 2 { 0.11 } else { 0.1 };
            match step.settle(optimizer.step(rate, model, window.gradients)) {
                Ok(settled) => model = settled,
                Err(TrainError::Drifted { drifted, .. }) => return (step.num_windows(), drifted),
                Err(other) => panic!("{other}"),
            }
        }
    }) {
        assert_eq!(found_after, (5, vec![2]));
    }
}

#[test]
fn local_sgd_averages_parameters_by_items_and_sends_nothing_in_between() {
    let num = NonZeroUsize::new(2).unwrap();
    for values in run_ranks(num, Duration::from_secs(10), |communicator| {
        let rank = communicator.rank();
        let counting = Arc::new(Counting::new(communicator));
        let model = Values::new(&[&[0.0]]);
        let options = SyncOptions { average_every: NonZeroUsize::new(2), ..SyncOptions::default() };
        let mut step = TrainingStep::new(counting.clone(), &model, options).unwrap();
        let mut model = step.synchronise(model).unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut values = Vec::new();
        for window in 1..=4 {
            // In the last window rank 1 has no items: it makes no step of its own, but averages.
            let (gradient, items) = if rank == 0 { (1.0, 3.0) } else { (-2.0, if window < 4 { 1.0 } else { 0.0 }) };
            counting.counts().reset();
            if window == 3 {
                // Handed over during backward, it is this rank's own all the same.
                step.overlapped(items).unwrap().ready(step.parameters()[0].id, primitive(&[gradient]));
            } else {
                step.micro_step(model.gradients(&[Some(&[gradient])]), items).unwrap();
            }
            if let Some(window) = step.finish().unwrap() {
                model = optimizer.step(1.0, model, window.gradients);
            }
            model = step.settle(model).unwrap();
            assert_eq!(counting.counts().tally().total_calls() > 0, window % 2 == 0, "window {window}");
            values.push(model.first());
        }
        (rank, values)
    }) {
        let own = [[-1.0, -1.5], [2.0, 1.5]][values.0];
        // -2 on 6 items and 4 on 2; then -2.5 on 6 items and 1.5 on 1.
        let expected = [own[0], -0.5, own[1], -13.5 / 7.0];
        for (found, expected) in values.1.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{values:?}");
        }
    }
}
