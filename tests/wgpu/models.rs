//! What is trained: images `[batch, 1, 10, 10]` to logits `[batch, 4]`. Nothing is drawn while training, since backends
//! draw different numbers.

use burn::{
    module::{AutodiffModule, Module},
    nn::{
        BatchNorm, BatchNormConfig, Linear, LinearConfig, Relu,
        conv::{Conv2d, Conv2dConfig},
        pool::{MaxPool2d, MaxPool2dConfig},
    },
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

pub(crate) const IMAGE_SIZE: usize = 10;
pub(crate) const NUM_CLASSES: usize = 4;

/// A model on any backend.
pub(crate) trait Classifier<B: Backend>: Module<B> {
    fn init(device: &B::Device) -> Self;
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2>;
}

/// A model that can be trained, and used without gradients.
pub(crate) trait Trainable<B: AutodiffBackend>:
    Classifier<B> + AutodiffModule<B, InnerModule: Classifier<B::InnerBackend>>
{
}

impl<B: AutodiffBackend, M> Trainable<B> for M where
    M: Classifier<B> + AutodiffModule<B, InnerModule: Classifier<B::InnerBackend>>
{
}

#[derive(Module, Debug)]
pub(crate) struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> for Mlp<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(IMAGE_SIZE * IMAGE_SIZE, 24).init(device),
            output: LinearConfig::new(24, NUM_CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.output.forward(Relu::new().forward(self.hidden.forward(images.flatten(1, 3))))
    }
}

#[derive(Module, Debug)]
pub(crate) struct Cnn<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    pool: MaxPool2d,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> for Cnn<B> {
    fn init(device: &B::Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm1: BatchNormConfig::new(4).init(device),
            conv2: Conv2dConfig::new([4, 6], [3, 3]).init(device),
            norm2: BatchNormConfig::new(6).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            output: LinearConfig::new(6 * 3 * 3, NUM_CLASSES).init(device),
        }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = Relu::new().forward(self.norm1.forward(self.conv1.forward(images)));
        let x = Relu::new().forward(self.norm2.forward(self.conv2.forward(x)));
        self.output.forward(self.pool.forward(x).flatten(1, 3))
    }
}
