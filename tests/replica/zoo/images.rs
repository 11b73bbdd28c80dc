//! LeNet, ResNet-18 and a UNet.

use bonfire_tests::images::{LeNet, ResNet, UNet};
use burn::{
    nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig},
    optim::{AdamConfig, SgdConfig, momentum::MomentumConfig},
    tensor::{activation::sigmoid, backend::AutodiffBackend},
};

use super::{
    data::{floats, ints},
    journal::{Journal, Program, fit},
    parity::{Expected, equals_one_device},
};

struct TrainLeNet;

impl Program for TrainLeNet {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        let model = fit::<B, _, _>(journal, LeNet::new(20, device), AdamConfig::new().init(), 1e-3, |model, step| {
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

struct TrainResNet;

impl Program for TrainResNet {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).init(device);
        let optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        // With ten times this rate so small a batch is chaos: 1e-7 in the first loss is 1e-3 in the fifteenth.
        let model = fit::<B, _, _>(journal, ResNet::new([6, 8, 10, 12], device), optimizer, 1e-3, |model, step| {
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

struct TrainUNet;

impl Program for TrainUNet {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = BinaryCrossEntropyLossConfig::new().with_logits(true).init(device);
        let model = fit::<B, _, _>(journal, UNet::new(4, device), AdamConfig::new().init(), 1e-3, |model, step| {
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
