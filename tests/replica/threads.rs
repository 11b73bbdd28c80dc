//! Several user threads at once: loaders, metrics, checkpoints, training.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::sync_channel,
    },
    thread,
};

use bonfire::{Replica, ReplicaDevice, Spread};
use bonfire_tests::images::LeNet;
use burn::{
    backend::Autodiff,
    module::AutodiffModule,
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, GradientsParams, Optimizer},
    tensor::{Tensor, backend::Backend},
};
use burn_flex::Flex;

use super::runs::{ALWAYS, draw_alone, floats, replica};

type B = Replica<Flex>;

#[test]
fn a_loader_a_metric_and_a_checkpoint_thread_use_clones_of_one_tensor_while_it_is_trained() {
    for spread in [ALWAYS, Spread::Eager] {
        let device = replica::<Flex>(3, spread);
        let weight = Tensor::<B, 2>::ones([6, 6], &device);
        let done = AtomicBool::new(false);
        let (batches, loaded) = sync_channel(4);
        let (losses, metrics) = sync_channel::<Tensor<B, 1>>(4);
        thread::scope(|scope| {
            scope.spawn({
                let device = device.clone();
                let weight = weight.clone();
                move || {
                    for step in 0..200 {
                        // A batch built on the loader's thread, from a tensor that all threads share.
                        let batch = Tensor::<B, 2>::full([5, 6], (step % 7) as f32, &device);
                        batches.send(batch.matmul(weight.clone())).unwrap();
                    }
                }
            });
            scope.spawn(move || {
                for (step, loss) in metrics.iter().enumerate() {
                    assert_eq!(loss.into_scalar(), (step % 7) as f32 * 36.0, "step {step}");
                }
            });
            for _ in 0..2 {
                let weight = weight.clone();
                let done = &done;
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        let saved: Vec<f32> = weight.clone().into_data().to_vec().unwrap();
                        assert!(saved.iter().all(|x| *x == 1.0));
                        assert_eq!((weight.clone() * 2.0).sum().into_scalar(), 72.0);
                    }
                });
            }
            for batch in loaded.iter() {
                let output: Tensor<B, 2> = batch.matmul(weight.clone());
                losses.send(output.mean()).unwrap();
            }
            drop(losses);
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(weight.sum().into_scalar(), 36.0);
    }
}

#[test]
fn threads_that_consume_clones_of_one_tensor_never_find_it_gone() {
    let device = replica::<Flex>(4, ALWAYS);
    for round in 0..50 {
        let x = Tensor::<B, 2>::full([8, 3], round as f32, &device).matmul(Tensor::ones([3, 3], &device));
        thread::scope(|scope| {
            for thread in 0..4 {
                let mine = x.clone();
                scope.spawn(move || {
                    let mut y = mine;
                    for _ in 0..5 {
                        y = (y + thread as f32).abs();
                    }
                    let expected = (3 * round + 5 * thread) as f32;
                    assert!(y.into_data().to_vec::<f32>().unwrap().iter().all(|v| *v == expected));
                });
            }
            drop(x);
        });
    }
}

/// CASES 47.
#[test]
fn autodiff_on_several_threads_gives_what_it_gives_on_one() {
    type Ad = Autodiff<B>;
    fn run(device: &bonfire::ReplicaDevice<Flex>, seed: usize) -> f32 {
        let mut weight = Tensor::<Ad, 2>::full([3, 3], 0.5, device);
        for step in 0..300 {
            let x = Tensor::<Ad, 2>::full([4, 3], ((seed + step) % 5) as f32 * 0.1, device);
            let tracked = weight.detach().require_grad();
            let loss = (x.matmul(tracked.clone()) - 1.0).square().mean();
            let grad = tracked.grad(&loss.backward()).unwrap();
            weight = Tensor::from_inner(tracked.inner() - grad * 0.1);
        }
        weight.sum().into_scalar()
    }
    let device = replica::<Flex>(2, ALWAYS);
    let alone: Vec<f32> = (0..4).map(|seed| run(&device, seed)).collect();
    let together: Vec<f32> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn({
                    let device = &device;
                    move || run(device, seed)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

/// Replicas of several sizes and several threads on one of them, all at once.
#[test]
fn several_groups_and_several_threads_train_at_once_as_they_do_alone() {
    type Ad = Autodiff<B>;
    fn fit(mut model: LeNet<Ad>, device: &ReplicaDevice<Flex>) -> Vec<f32> {
        let mut optimizer = AdamConfig::new().init();
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        for step in 0..40 {
            let images = floats::<Ad, 4>(step, [7, 1, 20, 20], device);
            let labels = Tensor::from_data([0, 1, 2, 3, 4, 5, 6], device);
            let loss = loss_fn.forward(model.forward(images), labels);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-2, model, grads);
        }
        let images = floats::<B, 4>(50, [3, 1, 20, 20], device);
        model.valid().forward(images).into_data().to_vec().unwrap()
    }
    let devices: Vec<_> = (1..=3).map(|num_members| replica::<Flex>(num_members, ALWAYS)).collect();
    // Two threads on each group.
    let jobs: Vec<(LeNet<Ad>, &ReplicaDevice<Flex>)> = {
        let _alone = draw_alone();
        Ad::seed(&devices[0], 3);
        let init = |device| {
            let model = LeNet::<Ad>::new(20, device);
            // Parameters are drawn when they are first used.
            model.forward(floats(0, [1, 1, 20, 20], device));
            (model, device)
        };
        devices.iter().chain(&devices).map(init).collect()
    };
    let alone: Vec<Vec<f32>> = jobs.iter().map(|(model, device)| fit(model.clone(), device)).collect();
    let together: Vec<Vec<f32>> = thread::scope(|scope| {
        let threads: Vec<_> = jobs.into_iter().map(|(model, device)| scope.spawn(move || fit(model, device))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    assert!(alone.iter().flatten().all(|value| value.is_finite()));
    assert!(devices.iter().all(|device| device.broken().is_none()));
}
