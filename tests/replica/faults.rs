//! What a user sees when something is wrong: a message on the thread that asked, never a hang.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use bonfire::{Replica, ReplicaDevice, ReplicaError, ReplicaOptions, Shares, Spread};
use burn::tensor::{Int, Tensor, backend::Backend};
use burn_flex::{Flex, FlexDevice};

use super::runs::{ALWAYS, replica};

type B = Replica<Flex>;

/// The message of the panic that `body` ends in, within ten seconds.
pub fn panic_of(body: impl FnOnce()) -> String {
    let start = Instant::now();
    let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("it should have panicked");
    assert!(start.elapsed() < Duration::from_secs(10));
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().expect("a panic with a text").to_string(),
    }
}

/// A tensor with parts on the members, `[8, 4]`.
fn spread_tensor(device: &ReplicaDevice<Flex>) -> Tensor<B, 2> {
    Tensor::ones([8, 4], device).matmul(Tensor::ones([4, 4], device))
}

#[test]
fn shapes_that_do_not_fit_panic_on_the_callers_thread_and_leave_the_replica_whole() {
    for num_members in [1, 4] {
        for spread in [ALWAYS, Spread::Eager] {
            let device = replica::<Flex>(num_members, spread);
            let x = spread_tensor(&device);
            let message = panic_of(|| {
                // Past burn-tensor's own checks, as a module's code may be.
                use burn::tensor::{TensorPrimitive, ops::FloatTensorOps};
                let TensorPrimitive::Float(lhs) = x.clone().into_primitive() else { unreachable!() };
                let TensorPrimitive::Float(rhs) = Tensor::<B, 2>::ones([5, 3], &device).into_primitive() else {
                    unreachable!()
                };
                <B as FloatTensorOps<B>>::float_matmul(lhs, rhs);
            });
            assert!(message.contains("float_matmul") && message.contains("[5, 3]"), "{message}");
            assert!(device.broken().is_none());
            assert_eq!(x.sum().into_scalar(), 128.0);
        }
    }
}

#[test]
fn a_failing_operation_surfaces_with_its_message_and_breaks_the_replica_for_good() {
    for num_members in [1, 4] {
        let device = replica::<Flex>(num_members, ALWAYS);
        let x = spread_tensor(&device);
        let kept = x.clone();
        let message = panic_of(|| {
            let far = Tensor::<B, 1, Int>::from_data([99], &device);
            x.select(1, far).into_data();
        });
        assert!(message.contains("float_select") && message.contains("member"), "{message}");
        let cause = device.broken().expect("the replica is broken").to_string();
        assert!(matches!(device.broken(), Some(ReplicaError::Panicked { operation: "float_select", .. })));

        // Every later operation and read says the same; nothing hangs, dropping what is left panics nowhere.
        assert_eq!(panic_of(|| drop(kept.clone() + 1.0)), cause);
        assert_eq!(panic_of(|| drop(kept.clone().into_data())), cause);
        assert!(B::sync(&device).unwrap_err().to_string().contains(&cause));
        drop(kept);
    }
}

#[test]
fn a_broken_default_replica_is_replaced_by_a_new_one() {
    let device = ReplicaDevice::<Flex>::default();
    assert_eq!(device, ReplicaDevice::default());
    // Spread by hand: the default spreads only what is worth it.
    let x = Tensor::<B, 2>::ones([256, 128], &device).matmul(Tensor::ones([128, 128], &device));
    panic_of(|| {
        x.select(1, Tensor::<B, 1, Int>::from_data([999], &device)).into_data();
    });
    let fresh = ReplicaDevice::<Flex>::default();
    assert_ne!(device, fresh);
    assert!(fresh.broken().is_none());
    assert_eq!(Tensor::<B, 1>::ones([3], &fresh).sum().into_scalar(), 3.0);
}

/// What only the inner backend used to notice, on a member.
#[test]
fn sizes_that_do_not_fit_a_layer_or_a_reduction_panic_on_the_callers_thread() {
    let device = replica::<Flex>(3, Spread::Eager);
    let x = Tensor::<B, 2>::ones([5, 3], &device);
    let norm = |num_features: usize| burn::nn::LayerNormConfig::new(num_features).init::<B>(&device);
    panic_of(|| drop(norm(4).forward(x.clone())));
    panic_of(|| drop(Tensor::<B, 2>::ones([0, 3], &device).max_dim(0)));
    panic_of(|| drop(Tensor::<B, 2>::ones([0, 3], &device).min()));
    assert!(device.broken().is_none());
    assert_eq!(norm(3).forward(x).into_data().shape.to_vec(), [5, 3]);
}

#[test]
fn tensors_of_two_replicas_do_not_mix() {
    let (one, other) = (replica::<Flex>(2, ALWAYS), replica::<Flex>(2, ALWAYS));
    let (x, y) = (spread_tensor(&one), spread_tensor(&other));
    let message = panic_of(|| drop(x.clone() + y.clone()));
    assert!(message.contains("not on the same device"), "{message}");
    assert_eq!((x + y.to_device(&one)).sum().into_scalar(), 256.0);
}

#[test]
fn settings_that_cannot_work_are_errors() {
    let none: [FlexDevice; 0] = [];
    assert!(matches!(ReplicaDevice::<Flex>::new(none), Err(ReplicaError::NoMembers)));
    for weights in [vec![1, 2, 3], vec![0, 0], vec![]] {
        let options = ReplicaOptions { shares: Shares::Weighted(weights), ..Default::default() };
        let error = ReplicaDevice::<Flex>::with_options([FlexDevice, FlexDevice], options).unwrap_err();
        assert!(matches!(error, ReplicaError::Shares { num_members: 2, .. }), "{error}");
    }
}

#[test]
fn a_full_queue_makes_the_caller_wait_and_loses_nothing() {
    let options = ReplicaOptions { max_queued_ops: 1, max_queued_bytes: 1, spread: ALWAYS, ..Default::default() };
    let device = ReplicaDevice::<Flex>::with_options(vec![FlexDevice; 3], options).unwrap();
    let mut sum = spread_tensor(&device);
    for _ in 0..200 {
        sum = sum + spread_tensor(&device);
    }
    assert_eq!(sum.mean().into_scalar(), 4.0 * 201.0);
}

#[test]
fn options_are_read_from_a_file_with_defaults_for_what_it_leaves_out() {
    let options: ReplicaOptions =
        serde_json::from_str(r#"{"shares": {"Weighted": [2, 1]}, "spread": {"OnHeavyOp": {"min_work": 9}}}"#).unwrap();
    let expected = ReplicaOptions {
        shares: Shares::Weighted(vec![2, 1]),
        spread: Spread::OnHeavyOp { min_work: 9 },
        ..Default::default()
    };
    assert_eq!(options, expected);
    let written = serde_json::to_string(&options).unwrap();
    assert_eq!(serde_json::from_str::<ReplicaOptions>(&written).unwrap(), expected);
    assert!(serde_json::from_str::<ReplicaOptions>(r#"{"share": 1}"#).is_err(), "a misspelt field is not ignored");
}

#[test]
fn more_members_than_threads_could_be_made_for_are_refused() {
    let error = ReplicaDevice::<Flex>::new(vec![FlexDevice; 100_000]).unwrap_err();
    assert!(matches!(error, ReplicaError::TooManyMembers { num_members: 100_000, .. }), "{error}");
}
