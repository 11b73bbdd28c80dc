//! A program that runs on any backend, and its results on one device and on members side by side.

use bonfire::{Replica, Spread};
use burn::tensor::{TensorData, backend::Backend};
use burn_flex::{Flex, FlexDevice};

use super::runs::{ALWAYS, draw_alone, replica};

/// Something to compute, the same on every backend.
pub trait Program {
    fn run<B: Backend>(device: &B::Device) -> Vec<TensorData>;
}

/// Runs `P` on Flex and on 1 to 4 members, spread late and at once; results differ by at most `tolerance`, relative to
/// the larger of 1 and the value.
pub fn same_as_one_device<P: Program>(tolerance: f64) {
    let _alone = draw_alone();
    <Flex as Backend>::seed(&FlexDevice, 3);
    let expected = P::run::<Flex>(&FlexDevice);
    assert!(!expected.is_empty());
    for num_members in 1..=4 {
        for spread in [ALWAYS, Spread::Eager] {
            let device = replica::<Flex>(num_members, spread);
            <Replica<Flex> as Backend>::seed(&device, 3);
            let found = P::run::<Replica<Flex>>(&device);
            assert_eq!(found.len(), expected.len());
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let context = format!("result {index} on {num_members} members, {spread:?}");
                assert_eq!((&found.shape, found.dtype), (&expected.shape, expected.dtype), "{context}");
                for (ours, theirs) in found.iter::<f64>().zip(expected.iter::<f64>()) {
                    let limit = tolerance * theirs.abs().max(1.0);
                    let close = (ours - theirs).abs() <= limit || ours == theirs || ours.is_nan() && theirs.is_nan();
                    assert!(close, "{context}: {ours}, on one device {theirs}");
                }
            }
        }
    }
}
