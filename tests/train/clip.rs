//! Clipping, which comes after the ranks' gradients have become one.

use bonfire::{
    collectives::Communicator,
    train::{SyncOptions, TrainingStep, Window, clip_by_global_norm},
};
use burn::{
    backend::Autodiff,
    grad_clipping::GradientClippingConfig,
    optim::{Optimizer, SgdConfig},
};
use burn_flex::Flex;

use crate::step::{Values, each_rank};

type B = Autodiff<Flex>;

/// CASES 22
#[test]
fn gradients_are_clipped_after_the_sync_and_after_unscaling() {
    for loss_scale in [1.0f32, 65536.0] {
        let clipped = each_rank(2, |communicator| {
            let gradient = [[3.0, 4.0], [0.0, 0.0]][communicator.rank()].map(|value| value * loss_scale);
            let model = Values::new(&[&[0.0, 0.0]]);
            let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
            step.micro_step(model.gradients(&[Some(&gradient)]), 1.0).unwrap();
            let Window { gradients, .. } = step.finish().unwrap().unwrap();
            let unscaled = model.read(&gradients)[0].clone().unwrap();
            let unscaled: Vec<f32> = unscaled.iter().map(|value| value / loss_scale).collect();
            let (clipped, norm) = clip_by_global_norm::<B, _>(&model, model.gradients(&[Some(&unscaled)]), 1.0);
            assert_eq!(norm, 2.5);
            // Burn's own clipping, in the optimizer, comes after `finish` too.
            let mut optimizer =
                SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(1.0))).init::<B, Values<B>>();
            let stepped = optimizer.step(1.0, model.clone(), model.gradients(&[Some(&unscaled)]));
            (model.read(&clipped)[0].clone().unwrap(), stepped.bits()[0].iter::<f32>().collect::<Vec<_>>())
        });
        for (clipped, stepped) in clipped {
            for (clipped, expected) in clipped.iter().zip([0.6, 0.8]) {
                assert!((clipped - expected).abs() < 1e-6, "{clipped}");
            }
            for (stepped, expected) in stepped.iter().zip([-0.6, -0.8]) {
                assert!((stepped - expected).abs() < 1e-6, "{stepped}");
            }
        }
    }
}

/// CASES 42
#[test]
fn clipping_is_not_per_replica() {
    for gradient in each_rank(2, |communicator| {
        let gradient = [3.0f32, -1.0][communicator.rank()];
        let model = Values::new(&[&[0.0]]);
        let mut step = TrainingStep::new(communicator, &model, SyncOptions::default()).unwrap();
        step.micro_step(model.gradients(&[Some(&[gradient])]), 1.0).unwrap();
        let window = step.finish().unwrap().unwrap();
        let (clipped, _) = clip_by_global_norm::<B, _>(&model, window.gradients, 1.0);
        model.read(&clipped)[0].clone().unwrap()[0]
    }) {
        assert_eq!(gradient, 1.0, "0 when clipped before the average");
    }
}

#[test]
fn a_global_norm_is_over_all_parameters() {
    let model = Values::new(&[&[0.0], &[0.0, 0.0], &[0.0]]);
    let gradients = || model.gradients(&[Some(&[2.0]), Some(&[4.0, 4.0]), None]);
    let (clipped, norm) = clip_by_global_norm::<B, _>(&model, gradients(), 3.0);
    assert_eq!(norm, 6.0);
    assert_eq!(model.read(&clipped), [Some(vec![1.0]), Some(vec![2.0, 2.0]), None]);
    let (kept, _) = clip_by_global_norm::<B, _>(&model, gradients(), 6.0);
    assert_eq!(model.read(&kept), model.read(&gradients()));
}
