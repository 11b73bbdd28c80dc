//! LeNet, ResNet-18 and a UNet.

use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
        conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig},
        interpolate::{Interpolate2d, Interpolate2dConfig, InterpolateMode},
        loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig},
        pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig},
    },
    optim::{AdamConfig, SgdConfig, momentum::MomentumConfig},
    tensor::{
        Tensor,
        activation::{sigmoid, tanh},
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::{floats, ints},
    journal::{Journal, Program, fit},
    parity::{Expected, equals_one_device},
};

fn conv(channels: [usize; 2], size: usize, stride: usize) -> Conv2dConfig {
    let padding = size / 2;
    Conv2dConfig::new(channels, [size, size])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
}

#[derive(Module, Debug)]
struct LeNet<B: Backend> {
    conv1: Conv2d<B>,
    conv2: Conv2d<B>,
    pool: AvgPool2d,
    linear1: Linear<B>,
    linear2: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> LeNet<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 6], [5, 5]).init(device),
            conv2: Conv2dConfig::new([6, 16], [5, 5]).init(device),
            pool: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            linear1: LinearConfig::new(16 * 2 * 2, 32).init(device),
            linear2: LinearConfig::new(32, 20).init(device),
            output: LinearConfig::new(20, 10).init(device),
        }
    }

    /// `[batch, 1, 20, 20]` to `[batch, 10]`.
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.pool.forward(tanh(self.conv1.forward(images)));
        let x = self.pool.forward(tanh(self.conv2.forward(x)));
        let x = tanh(self.linear1.forward(x.flatten(1, 3)));
        self.output.forward(tanh(self.linear2.forward(x)))
    }
}

struct TrainLeNet;

impl Program for TrainLeNet {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        let model = fit::<B, _, _>(journal, LeNet::new(device), AdamConfig::new().init(), 1e-3, |model, step| {
            let images = floats::<B, 4>(step, [9, 1, 20, 20], device);
            loss_fn.forward(model.forward(images), ints(step, [9], 10, device))
        });
        journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [5, 1, 20, 20], device)));
    }
}

#[test]
fn a_lenet_trains_as_on_one_device() {
    // The loss is formed with the gradients.
    equals_one_device::<TrainLeNet>(Expected::new(1));
}

/// Two convolutions beside a shortcut.
#[derive(Module, Debug)]
struct Residual<B: Backend> {
    conv1: Conv2d<B>,
    norm1: BatchNorm<B>,
    conv2: Conv2d<B>,
    norm2: BatchNorm<B>,
    relu: Relu,
    shortcut: Option<Shortcut<B>>,
}

#[derive(Module, Debug)]
struct Shortcut<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> Residual<B> {
    fn new(channels: [usize; 2], stride: usize, device: &B::Device) -> Self {
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

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let y = self.relu.forward(self.norm1.forward(self.conv1.forward(x.clone())));
        let y = self.norm2.forward(self.conv2.forward(y));
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.norm.forward(shortcut.conv.forward(x)),
            None => x,
        };
        self.relu.forward(x + y)
    }
}

/// ResNet-18 for small images, with an eighth of its channels or less.
#[derive(Module, Debug)]
struct ResNet<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    relu: Relu,
    blocks: Vec<Residual<B>>,
    pool: AdaptiveAvgPool2d,
    output: Linear<B>,
}

impl<B: Backend> ResNet<B> {
    fn new(device: &B::Device) -> Self {
        let block = |channels, stride| Residual::new(channels, stride, device);
        Self {
            conv: conv([3, 6], 3, 1).with_bias(false).init(device),
            norm: BatchNormConfig::new(6).init(device),
            relu: Relu::new(),
            blocks: vec![
                block([6, 6], 1),
                block([6, 6], 1),
                block([6, 8], 2),
                block([8, 8], 1),
                block([8, 10], 2),
                block([10, 10], 1),
                block([10, 12], 2),
                block([12, 12], 1),
            ],
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            output: LinearConfig::new(12, 10).init(device),
        }
    }

    /// `[batch, 3, 16, 16]` to `[batch, 10]`.
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.relu.forward(self.norm.forward(self.conv.forward(images)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        self.output.forward(self.pool.forward(x).flatten(1, 3))
    }
}

struct TrainResNet;

impl Program for TrainResNet {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).init(device);
        let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        // With ten times this rate so small a batch is chaos: 1e-7 in the first loss is 1e-3 in the fifteenth.
        let model = fit::<B, _, _>(journal, ResNet::new(device), optimizer, 1e-3, |model, step| {
            let images = floats::<B, 4>(step, [6, 3, 16, 16], device);
            loss_fn.forward(model.forward(images), ints(step, [6], 10, device))
        });
        journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [5, 3, 16, 16], device)));
    }
}

#[test]
fn a_resnet_trains_as_on_one_device() {
    // Twenty BatchNorms: two statistics forward and two backward each. At a shortcut the backward passes of two of them
    // alternate, and one statistic of each is formed together with the other's and with all gradients so far.
    equals_one_device::<TrainResNet>(Expected::new(1 + 4 * 20 - 3));
}

#[derive(Module, Debug)]
struct UNet<B: Backend> {
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
    fn new(device: &B::Device) -> Self {
        let twice = Interpolate2dConfig::new().with_scale_factor(Some([2.0, 2.0])).with_mode(InterpolateMode::Linear);
        Self {
            down1: conv([1, 4], 3, 1).init(device),
            norm1: GroupNormConfig::new(2, 4).init(device),
            down2: conv([4, 8], 3, 1).init(device),
            norm2: GroupNormConfig::new(2, 8).init(device),
            bottom: conv([8, 8], 3, 1).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            up2: ConvTranspose2dConfig::new([8, 8], [2, 2]).with_stride([2, 2]).init(device),
            merge2: conv([16, 4], 3, 1).init(device),
            up1: twice.init(),
            merge1: conv([8, 1], 3, 1).init(device),
            relu: Relu::new(),
        }
    }

    /// `[batch, 1, height, width]` to logits of the same shape.
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 4> {
        let skip1 = self.relu.forward(self.norm1.forward(self.down1.forward(images)));
        let skip2 = self.relu.forward(self.norm2.forward(self.down2.forward(self.pool.forward(skip1.clone()))));
        let x = self.relu.forward(self.bottom.forward(self.pool.forward(skip2.clone())));
        let x = Tensor::cat(vec![self.up2.forward(x), skip2], 1);
        let x = self.relu.forward(self.merge2.forward(x));
        let x = Tensor::cat(vec![self.up1.forward(x), skip1], 1);
        self.merge1.forward(x)
    }
}

struct TrainUNet;

impl Program for TrainUNet {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = BinaryCrossEntropyLossConfig::new().with_logits(true).init(device);
        let model = fit::<B, _, _>(journal, UNet::new(device), AdamConfig::new().init(), 1e-3, |model, step| {
            let logits = model.forward(floats::<B, 4>(step, [7, 1, 12, 12], device));
            let mask = ints(step, [7, 1, 12, 12], 2, device);
            // Cross entropy and the overlap of the two (Dice), as in segmentation.
            let overlap = (sigmoid(logits.clone()) * mask.clone().float()).sum();
            let total = (sigmoid(logits.clone()) + mask.clone().float()).sum();
            loss_fn.forward(logits, mask) - overlap * 2.0 / (total + 1.0)
        });
        journal.finish::<B, _, 4>(&model, |model| model.forward(floats(99, [3, 1, 12, 12], device)));
    }
}

#[test]
fn a_unet_trains_as_on_one_device() {
    // The three sums of the loss, once one of them is divided by another, and the gradients.
    equals_one_device::<TrainUNet>(Expected::new(2));
}
