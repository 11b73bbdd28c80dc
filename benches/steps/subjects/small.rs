//! Models of the benches' own, from one too small to share to a CNN: images `[batch, 1, side, side]` to logits.

use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, Linear, LinearConfig, Relu,
        conv::{Conv2d, Conv2dConfig},
        pool::{MaxPool2d, MaxPool2dConfig},
    },
    tensor::{Tensor, backend::Backend},
};

/// 784-512-10.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    activation: Relu,
}

impl<B: Backend> Mlp<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(784, 512).init(device),
            output: LinearConfig::new(512, 10).init(device),
            activation: Relu::new(),
        }
    }

    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.output.forward(self.activation.forward(self.hidden.forward(images.flatten(1, 3))))
    }
}

/// 4-8-3: too small to share.
#[derive(Module, Debug)]
pub struct Tiny<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    activation: Relu,
}

impl<B: Backend> Tiny<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(4, 8).init(device),
            output: LinearConfig::new(8, 3).init(device),
            activation: Relu::new(),
        }
    }

    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.output.forward(self.activation.forward(self.hidden.forward(images.flatten(1, 3))))
    }
}

/// Two convolutions with BatchNorm and pooling, one linear layer.
#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    pool: MaxPool2d,
    output: Linear<B>,
    activation: Relu,
}

impl<B: Backend> Cnn<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            norm1: BatchNormConfig::new(8).init(device),
            conv2: Conv2dConfig::new([8, 16], [3, 3]).init(device),
            norm2: BatchNormConfig::new(16).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            output: LinearConfig::new(16 * 5 * 5, 10).init(device),
            activation: Relu::new(),
        }
    }

    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.pool.forward(self.conv1.forward(images));
        let x = self.activation.forward(self.norm1.forward(x));
        let x = self.pool.forward(self.conv2.forward(x));
        let x = self.activation.forward(self.norm2.forward(x));
        self.output.forward(x.flatten(1, 3))
    }
}
