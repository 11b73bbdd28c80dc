//! A training loop of one's own on ranks, without `burn-train`: for reinforcement learning, several optimizers, and
//! whatever else a learner does not fit.
//!
//! `mpirun -n 2 target/release/examples/own_loop`, or any other launcher, or none.
//!
//! ```text
//! loader -> micro steps -> finish (mean over ranks) -> clip -> optimizer -> settle
//! ```

use std::sync::Arc;

use anyhow::{Context, Result};
use bonfire::collectives::{Communicator, ProcessGroup};
use bonfire::train::{DistributedDataLoaderBuilder, SyncOptions, TrainingStep, clip_by_global_norm};
use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::tanh;
use burn::tensor::backend::AutodiffBackend;
use burn_flex::{Flex, FlexDevice};

type MyBackend = Autodiff<Flex>;

const NUM_EPOCHS: usize = 30;
const LEARNING_RATE: f64 = 0.1;

/// `[batch, 1]` -> `[batch, 1]`.
#[derive(Module, Debug)]
struct Curve<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Curve<B> {
    fn new(device: &B::Device) -> Self {
        Self { hidden: LinearConfig::new(1, 16).init(device), output: LinearConfig::new(16, 1).init(device) }
    }

    /// The mean squared distance to a sine.
    fn loss(&self, inputs: Tensor<B, 2>) -> Tensor<B, 1> {
        let outputs = self.output.forward(tanh(self.hidden.forward(inputs.clone())));
        (outputs - inputs.sin()).square().mean()
    }
}

/// Numbers as a tensor.
struct Numbers;

impl<B: Backend> Batcher<B, f32, Tensor<B, 2>> for Numbers {
    fn batch(&self, numbers: Vec<f32>, device: &B::Device) -> Tensor<B, 2> {
        let num = numbers.len();
        Tensor::from_data(TensorData::new(numbers, [num, 1]), device)
    }
}

fn main() -> Result<()> {
    // Launched alone, a group of one rank; `run_groups` has the same for ranks that are threads.
    let group = ProcessGroup::from_env()?;
    MyBackend::seed(&FlexDevice, 1);
    let loss = train(Curve::<MyBackend>::new(&FlexDevice), group.communicator())?;
    println!("rank {} of {}: {loss:.5}", group.rank(), group.world_size());
    Ok(())
}

/// One rank; gives the loss over all items in the end.
fn train<B: AutodiffBackend>(model: Curve<B>, communicator: Arc<dyn Communicator>) -> Result<f64> {
    let device = model.devices().into_iter().next().context("the model has parameters")?;
    let items: Vec<f32> = (0..100).map(|item| item as f32 / 25.0 - 2.0).collect();
    let loader = DistributedDataLoaderBuilder::new(Numbers)
        .batch_size(16)
        .accumulation_steps(2)
        .shuffle(1)
        .rank(communicator.rank(), communicator.world_size())
        .device(device.clone())
        .build(InMemDataset::new(items.clone()))?;
    let handle = loader.handle();

    // Copies of one model share its tensors with their gradients; each rank needs its own.
    let mut model = model.fork(&device);
    let mut optimizer = SgdConfig::new().init();
    let mut step = TrainingStep::new(communicator, &model, SyncOptions::default())?;
    model = step.synchronise(model)?;

    for _ in 0..NUM_EPOCHS {
        let mut batches = loader.iter();
        // All ranks have the same windows and micro steps, but not in each of them an item.
        while let Some(window) = handle.next_window() {
            for micro_step in &window.micro_steps {
                if micro_step.has_batch() {
                    let batch = batches.next().context("a batch of each micro step")?;
                    let gradients = GradientsParams::from_grads(model.loss(batch).backward(), &model);
                    step.micro_step(gradients, handle.last_weight().context("the weight of the batch")?)?;
                }
            }
            if let Some(window) = step.finish()? {
                let (gradients, _norm) = clip_by_global_norm::<B, _>(&model, window.gradients, 1.0);
                model = optimizer.step(LEARNING_RATE, model, gradients);
            }
            model = step.settle(model)?;
        }
    }

    let num = items.len();
    let all = Tensor::from_data(TensorData::new(items, [num, 1]), &device);
    Ok(model.loss(all).into_scalar().elem())
}
