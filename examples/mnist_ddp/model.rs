//! The network of `examples/mnist`, whose batch norm sees the batches of all ranks.

use bonfire::train::{SyncBatchNorm, SyncGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

use crate::data::{DigitBatch, NUM_CLASSES, SIDE};

/// `[batch, 1, 28, 28]` -> two blocks -> `[batch, 16, 7, 7]` -> two linear layers -> `[batch, 10]`.
#[derive(Module, Debug)]
pub(crate) struct Cnn<B: Backend> {
    block1: Block<B>,
    block2: Block<B>,
    hidden: Linear<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: Backend> Cnn<B> {
    pub(crate) fn new(dropout: f64, device: &B::Device) -> Self {
        const CHANNELS: [usize; 3] = [1, 8, 16];
        const NUM_HIDDEN: usize = 64;
        // Each of the two blocks halves height and width.
        let num_features = CHANNELS[2] * (SIDE / 4) * (SIDE / 4);
        Self {
            block1: Block::new([CHANNELS[0], CHANNELS[1]], device),
            block2: Block::new([CHANNELS[1], CHANNELS[2]], device),
            hidden: LinearConfig::new(num_features, NUM_HIDDEN).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            output: LinearConfig::new(NUM_HIDDEN, NUM_CLASSES).init(device),
        }
    }

    /// The same network, in training normalised over the batches of all ranks.
    pub(crate) fn synchronised(self, group: &SyncGroup) -> Self {
        Self { block1: self.block1.synchronised(group), block2: self.block2.synchronised(group), ..self }
    }

    /// Scores of the classes, `[batch, 10]`, of images `[batch, 1, 28, 28]`.
    pub(crate) fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let features = self.block2.forward(self.block1.forward(images)).flatten(1, 3);
        let hidden = relu(self.hidden.forward(features));
        self.output.forward(self.dropout.forward(hidden))
    }

    fn classify(&self, batch: DigitBatch<B>) -> ClassificationOutput<B> {
        let scores = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&scores.device());
        let loss = loss.forward(scores.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, scores, batch.labels)
    }
}

impl<B: AutodiffBackend> TrainStep for Cnn<B> {
    type Input = DigitBatch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: DigitBatch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Cnn<B> {
    type Input = DigitBatch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: DigitBatch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

/// Convolution, pooling that halves height and width, batch normalisation, ReLU.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    conv: Conv2d<B>,
    pool: MaxPool2d,
    norm: Norm<B>,
}

/// Batch normalisation over this rank's share of a batch, or all of it.
#[derive(Module, Debug)]
enum Norm<B: Backend> {
    Own(BatchNorm<B>),
    Synchronised(SyncBatchNorm<B>),
}

impl<B: Backend> Block<B> {
    fn new([num_in, num_out]: [usize; 2], device: &B::Device) -> Self {
        Self {
            // The normalisation subtracts the mean, so a bias before it would do nothing.
            conv: Conv2dConfig::new([num_in, num_out], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_bias(false)
                .init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            norm: Norm::Own(BatchNormConfig::new(num_out).init(device)),
        }
    }

    fn synchronised(self, group: &SyncGroup) -> Self {
        let norm = match self.norm {
            Norm::Own(norm) => Norm::Synchronised(SyncBatchNorm::new(norm, group)),
            synchronised @ Norm::Synchronised(_) => synchronised,
        };
        Self { norm, ..self }
    }

    fn forward(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        let output = self.pool.forward(self.conv.forward(input));
        relu(match &self.norm {
            Norm::Own(norm) => norm.forward(output),
            Norm::Synchronised(norm) => norm.forward(output),
        })
    }
}
