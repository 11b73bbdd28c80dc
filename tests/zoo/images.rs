//! LeNet, ResNet-18 and a UNet.

use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
        conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig},
        interpolate::{Interpolate2d, Interpolate2dConfig, InterpolateMode},
        pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig},
    },
    tensor::{Tensor, activation::tanh, backend::Backend},
};

fn conv(channels: [usize; 2], size: usize, stride: usize) -> Conv2dConfig {
    let padding = size / 2;
    Conv2dConfig::new(channels, [size, size])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
}

/// Two convolutions and three linear layers.
#[derive(Module, Debug)]
pub struct LeNet<B: Backend> {
    conv1: Conv2d<B>,
    conv2: Conv2d<B>,
    pool: AvgPool2d,
    linear1: Linear<B>,
    linear2: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> LeNet<B> {
    /// For images of `side` pixels in height and width; `side - 12` is a multiple of 4.
    pub fn new(side: usize, device: &B::Device) -> Self {
        let side = (side - 12) / 4;
        Self {
            conv1: Conv2dConfig::new([1, 6], [5, 5]).init(device),
            conv2: Conv2dConfig::new([6, 16], [5, 5]).init(device),
            pool: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            linear1: LinearConfig::new(16 * side * side, 32).init(device),
            linear2: LinearConfig::new(32, 20).init(device),
            output: LinearConfig::new(20, 10).init(device),
        }
    }

    /// `[batch, 1, side, side]` to `[batch, 10]`.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.pool.forward(tanh(self.conv1.forward(images)));
        let x = self.pool.forward(tanh(self.conv2.forward(x)));
        let x = tanh(self.linear1.forward(x.flatten(1, 3)));
        self.output.forward(tanh(self.linear2.forward(x)))
    }
}

/// Two convolutions beside a shortcut.
#[derive(Module, Debug)]
pub struct Residual<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    relu: Relu,
    shortcut: Option<Shortcut<B>>,
}

#[derive(Module, Debug)]
pub struct Shortcut<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> Residual<B> {
    pub fn new(channels: [usize; 2], stride: usize, device: &B::Device) -> Self {
        let [_, out] = channels;
        Self {
            conv1: conv(channels, 3, stride).with_bias(false).init(device),
            norm1: BatchNormConfig::new(out).init(device),
            conv2: conv([out, out], 3, 1).with_bias(false).init(device),
            norm2: BatchNormConfig::new(out).init(device),
            relu: Relu::new(),
            shortcut: (stride > 1).then(|| Shortcut {
                conv: conv(channels, 1, stride).with_bias(false).init(device),
                norm: BatchNormConfig::new(out).init(device),
            }),
        }
    }

    pub fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let y = self.relu.forward(self.norm1.forward(self.conv1.forward(x.clone())));
        let y = self.norm2.forward(self.conv2.forward(y));
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.norm.forward(shortcut.conv.forward(x)),
            None => x,
        };
        self.relu.forward(x + y)
    }
}

/// ResNet-18 for small images.
#[derive(Module, Debug)]
pub struct ResNet<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    relu: Relu,
    blocks: Vec<Residual<B>>,
    pool: AdaptiveAvgPool2d,
    output: Linear<B>,
}

impl<B: Backend> ResNet<B> {
    /// With the channels of each of the four stages: the paper has `[64, 128, 256, 512]`.
    ///
    /// Source: He et al., Deep Residual Learning for Image Recognition, 2015.
    pub fn new([first, second, third, last]: [usize; 4], device: &B::Device) -> Self {
        let block = |channels, stride| Residual::new(channels, stride, device);
        Self {
            conv: conv([3, first], 3, 1).with_bias(false).init(device),
            norm: BatchNormConfig::new(first).init(device),
            relu: Relu::new(),
            blocks: vec![
                block([first, first], 1),
                block([first, first], 1),
                block([first, second], 2),
                block([second, second], 1),
                block([second, third], 2),
                block([third, third], 1),
                block([third, last], 2),
                block([last, last], 1),
            ],
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            output: LinearConfig::new(last, 10).init(device),
        }
    }

    /// `[batch, 3, height, width]` to `[batch, 10]`.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.relu.forward(self.norm.forward(self.conv.forward(images)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.output.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// Down twice, and up again beside what it saw on the way.
#[derive(Module, Debug)]
pub struct UNet<B: Backend> {
    down1: Conv2d<B>,
    norm1: GroupNorm<B>,
    down2: Conv2d<B>,
    norm2: GroupNorm<B>,
    bottom: Conv2d<B>,
    pool: MaxPool2d,
    up2: ConvTranspose2d<B>,
    merge2: Conv2d<B>,
    up1: Interpolate2d,
    merge1: Conv2d<B>,
    relu: Relu,
}

impl<B: Backend> UNet<B> {
    /// `width` is the number of its first channels, an even one.
    pub fn new(width: usize, device: &B::Device) -> Self {
        let twice = Interpolate2dConfig::new().with_scale_factor(Some([2.0, 2.0])).with_mode(InterpolateMode::Linear);
        Self {
            down1: conv([1, width], 3, 1).init(device),
            norm1: GroupNormConfig::new(2, width).init(device),
            down2: conv([width, 2 * width], 3, 1).init(device),
            norm2: GroupNormConfig::new(2, 2 * width).init(device),
            bottom: conv([2 * width, 2 * width], 3, 1).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            up2: ConvTranspose2dConfig::new([2 * width, 2 * width], [2, 2]).with_stride([2, 2]).init(device),
            merge2: conv([4 * width, width], 3, 1).init(device),
            up1: twice.init(),
            merge1: conv([2 * width, 1], 3, 1).init(device),
            relu: Relu::new(),
        }
    }

    /// `[batch, 1, height, width]` to logits of the same shape.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 4> {
        let skip1 = self.relu.forward(self.norm1.forward(self.down1.forward(images)));
        let skip2 = self.relu.forward(self.norm2.forward(self.down2.forward(self.pool.forward(skip1.clone()))));
        let x = self.relu.forward(self.bottom.forward(self.pool.forward(skip2.clone())));
        let x = Tensor::cat(vec![self.up2.forward(x), skip2], 1);
        let x = self.relu.forward(self.merge2.forward(x));
        let x = Tensor::cat(vec![self.up1.forward(x), skip1], 1);
        self.merge1.forward(x)
    }
}
