//! Random numbers of ranks.

use bonfire::{RandomMode, Replica, ReplicaDevice, ReplicaOptions, train::RankSeed};
use burn::{
    backend::Autodiff,
    nn::DropoutConfig,
    tensor::{Tensor, backend::Backend},
};
use burn_flex::{Flex, FlexDevice};

use crate::step::each_rank;

type B = Autodiff<Replica<Flex>>;

/// Each rank's dropout masks in two epochs; ranks have generators of their own, as processes have.
fn masks(seed: u64) -> Vec<[Vec<f32>; 2]> {
    each_rank(2, |communicator| {
        let options = ReplicaOptions { random: RandomMode::Counter, ..ReplicaOptions::default() };
        let device = ReplicaDevice::with_options([FlexDevice], options).unwrap();
        B::seed(&device, seed);
        let seed = RankSeed::agree::<B>(&*communicator, &device).unwrap();
        [1, 2].map(|epoch| {
            seed.apply::<B>(&device, epoch);
            let dropout = DropoutConfig::new(0.5).init();
            dropout.forward(Tensor::<B, 1>::ones([1000], &device)).into_data().iter().collect()
        })
    })
}

/// CASES 24
#[test]
fn ranks_that_were_seeded_alike_have_different_dropout_masks_and_two_runs_the_same() {
    let ranks = masks(7);
    let all: Vec<&Vec<f32>> = ranks.iter().flatten().collect();
    for (index, mask) in all.iter().enumerate() {
        let num_kept = mask.iter().filter(|&&value| value > 0.0).count();
        assert!((400..600).contains(&num_kept), "{num_kept} of 1000");
        assert!(all[..index].iter().all(|other| other != mask));
    }
    assert_eq!(masks(7), ranks);
    assert_ne!(masks(8), ranks);
}
