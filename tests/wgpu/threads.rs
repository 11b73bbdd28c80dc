//! One device, several threads: each has a stream of its own, and what one makes the others read.

use bonfire::ReplicaDevice;
use burn::tensor::{Tensor, TensorData, backend::Backend};
use burn_wgpu::Wgpu;

use crate::device::{B, lavapipe, replica};

const ROWS: usize = 6;
const LENGTH: usize = 32;

/// Holds `value` everywhere.
fn constant<B: Backend>(value: f32, device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(vec![value; ROWS * LENGTH], [ROWS, LENGTH]), device)
}

fn assert_all(what: &str, tensor: Tensor<B, 2>, expected: f32) {
    let values = tensor.into_data().to_vec::<f32>().unwrap();
    assert!(values.iter().all(|&value| value == expected), "{what}: {:?}, not {expected}", &values[..4]);
}

/// The identity, which makes a product heavy and leaves values alone.
fn identity(device: &ReplicaDevice<Wgpu>) -> Tensor<B, 2> {
    Tensor::eye(LENGTH, device)
}

/// The caller gives up a batch as soon as it has used it, and makes the next one in its memory.
#[test]
fn a_batch_may_be_written_over_as_soon_as_the_caller_has_given_it_up() {
    let device = replica(2);
    let identity = identity(&device);
    let results: Vec<_> = (0..300)
        .map(|i| {
            let product = constant::<B>(i as f32, &device).matmul(identity.clone());
            // At home, in the same memory, and submitted at once.
            let next = constant::<B>(-1.0, &device);
            if i % 3 == 0 {
                assert_all("at home", next * 2.0, -2.0);
            }
            product
        })
        .collect();
    for (i, result) in results.into_iter().enumerate() {
        assert_all(&format!("batch {i}"), result, i as f32);
    }
}

/// A weight is spread once and then changed in place by each member, while the caller's copy stays what it was.
#[test]
fn members_change_their_own_copy_of_a_weight() {
    let device = replica(3);
    let weight = identity(&device);
    let mut own = weight.clone();
    let x = constant::<B>(1.0, &device);
    for i in 0..100 {
        // The product before and after the change, which no other member's change may reach.
        let before = x.clone().matmul(own.clone());
        own = own * 2.0;
        let after = x.clone().matmul(own.clone());
        own = own * 0.5;
        if i % 10 == 9 {
            assert_all(&format!("before change {i}"), before, 1.0);
            assert_all(&format!("after change {i}"), after, 2.0);
        }
    }
    assert_all("the caller's copy", x.matmul(weight), 1.0);
}

/// What one member made the others read whole, while it goes on in the same memory.
#[test]
fn parts_that_go_from_member_to_member_are_read_before_they_are_written_over() {
    let device = replica(3);
    let identity = identity(&device);
    let results: Vec<_> = (0..100)
        .map(|i| {
            let rows = constant::<B>(i as f32, &device).matmul(identity.clone());
            // The rows of all members, then shared out along the other dim.
            let sorted = rows.clone().sort(0);
            let columns = (rows * 3.0).transpose().matmul(constant::<B>(1.0, &device));
            (sorted, columns)
        })
        .collect();
    for (i, (sorted, columns)) in results.into_iter().enumerate() {
        assert_all(&format!("sorted {i}"), sorted, i as f32);
        let values = columns.into_data().to_vec::<f32>().unwrap();
        assert!(values.iter().all(|&value| value == (3 * ROWS * i) as f32), "columns {i}: {:?}", &values[..4]);
    }
}

/// Several user threads on one replica, each with its own stream.
#[test]
fn threads_of_the_user_share_a_replica() {
    let device = replica(2);
    let identity = identity(&device);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (device, identity) = (&device, &identity);
            scope.spawn(move || {
                for i in 0..60 {
                    let value = (thread * 1000 + i) as f32;
                    let product = constant::<B>(value, device).matmul(identity.clone());
                    assert_all(&format!("thread {thread}, batch {i}"), product + 1.0, value + 1.0);
                }
            });
        }
    });
}

#[test]
fn the_default_device_has_every_gpu_or_else_one_member() {
    lavapipe();
    let device = ReplicaDevice::<Wgpu>::default();
    let mut members = device.members().to_vec();
    members.dedup();
    assert_eq!(members, device.members(), "no device serves two members");
    let product = constant::<B>(3.0, &device).matmul(identity(&device));
    assert_all("on the default device", product, 3.0);
}
