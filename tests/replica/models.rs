//! Models as users write them.

use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Relu,
        conv::{Conv2d, Conv2dConfig},
        pool::{MaxPool2d, MaxPool2dConfig},
    },
    tensor::{Tensor, backend::Backend},
};

/// What the tests train: images `[batch, 1, 12, 12]` to logits `[batch, 10]`.
pub trait Classifier<B: Backend>: Module<B> {
    fn init(device: &B::Device) -> Self;
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2>;
}

#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    dropout: Dropout,
    activation: Relu,
}

impl<B: Backend> Classifier<B> for Mlp<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(144, 64).init(device),
            output: LinearConfig::new(64, 10).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            activation: Relu::new(),
        }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.hidden.forward(images.flatten(1, 3));
        self.output.forward(self.dropout.forward(self.activation.forward(x)))
    }
}

#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    pool: MaxPool2d,
    dropout: Dropout,
    output: Linear<B>,
    activation: Relu,
}

impl<B: Backend> Classifier<B> for Cnn<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            norm1: BatchNormConfig::new(8).init(device),
            conv2: Conv2dConfig::new([8, 12], [3, 3]).init(device),
            norm2: BatchNormConfig::new(12).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(0.25).init(),
            output: LinearConfig::new(12 * 4 * 4, 10).init(device),
            activation: Relu::new(),
        }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.activation.forward(self.norm1.forward(self.conv1.forward(images)));
        let x = self.activation.forward(self.norm2.forward(self.conv2.forward(x)));
        let x = self.dropout.forward(self.pool.forward(x));
        self.output.forward(x.flatten(1, 3))
    }
}
