//! The same program on any number of members gives the numbers of one device.

use bonfire::{Member, Replica, Spread};
use burn::{backend::Autodiff, tensor::backend::Backend};

use burn_flex::Flex;
use burn_ndarray::NdArray;

use super::{
    models::{Classifier, Cnn, Mlp},
    runs::{ALWAYS, F32, F64, Tolerance, assert_equal, draw_alone, replica, train},
};

const BATCH_SIZES: [usize; 4] = [64, 7, 3, 1];

/// Trains on the plain backend, then on 1 to 4 members, spread late and at once, and compares.
fn equals_one_device<B: Member, P, R>(batch_sizes: &[usize], tolerance: Tolerance)
where
    P: Classifier<Autodiff<B>> + burn::module::AutodiffModule<Autodiff<B>>,
    R: Classifier<Autodiff<Replica<B>>> + burn::module::AutodiffModule<Autodiff<Replica<B>>>,
{
    let _alone = draw_alone();
    for &batch_size in batch_sizes {
        let plain = train::<Autodiff<B>, P>(&B::Device::default(), batch_size, 7);
        for num_members in 1..=4 {
            for spread in [ALWAYS, Spread::Eager] {
                let device = replica::<B>(num_members, spread);
                let run = train::<Autodiff<Replica<B>>, R>(&device, batch_size, 7);
                let backend = <Replica<B> as Backend>::name(&device);
                assert_equal(&run, &plain, tolerance, &format!("{backend}, {spread:?}, batch {batch_size}"));
            }
        }
    }
}

#[test]
fn an_mlp_on_members_trains_as_on_one_device() {
    equals_one_device::<Flex, Mlp<_>, Mlp<_>>(&BATCH_SIZES, F32);
}

#[test]
fn a_cnn_on_members_trains_as_on_one_device() {
    equals_one_device::<Flex, Cnn<_>, Cnn<_>>(&BATCH_SIZES, F32);
}

/// NdArray inside, in f64. (Burn keeps one default dtype per device type, so a process has NdArray in f32 or in f64.)
#[test]
fn models_in_f64_on_ndarray_members_agree_to_the_last_digits() {
    equals_one_device::<NdArray<f64>, Mlp<_>, Mlp<_>>(&[64, 7, 3, 1], F64);
    equals_one_device::<NdArray<f64>, Cnn<_>, Cnn<_>>(&[7, 1], F64);
}

#[test]
fn two_runs_are_bitwise_equal() {
    let _alone = draw_alone();
    for num_members in [1, 3, 4] {
        for spread in [ALWAYS, Spread::Eager] {
            let run = || train::<Autodiff<Replica<Flex>>, Cnn<_>>(&replica(num_members, spread), 7, 11);
            assert_eq!(run(), run(), "{num_members} members, {spread:?}");
        }
    }
}

/// On one device that is used again, too: nothing that a first run leaves behind changes a second one.
#[test]
fn two_runs_on_one_replica_are_bitwise_equal() {
    let _alone = draw_alone();
    let device = replica::<Flex>(3, ALWAYS);
    let run = || train::<Autodiff<Replica<Flex>>, Cnn<_>>(&device, 7, 11);
    assert_eq!(run(), run());
}
