//! A GAN with two optimizers, a VAE that draws in its forward pass, an autoencoder of sequences.

use bonfire_tests::generative::{Autoencoder, Discriminator, Generator, Vae};
use burn::{
    grad_clipping::GradientClippingConfig,
    nn::loss::{BinaryCrossEntropyLossConfig, MseLoss, Reduction},
    optim::{AdamConfig, GradientsParams, Optimizer, RmsPropConfig},
    tensor::{Distribution, Tensor, backend::AutodiffBackend},
};

use super::{
    data::floats,
    journal::{Journal, NUM_STEPS, Program, fit},
    parity::{Expected, equals_one_device},
};

const NUM_LATENT: usize = 5;
const NUM_FEATURES: usize = 12;

struct TrainGan;

impl Program for TrainGan {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut generator = Generator::<B>::new(NUM_LATENT, 16, NUM_FEATURES, device);
        let mut discriminator = Discriminator::<B>::new(NUM_FEATURES, 16, device);
        let mut generators_optimizer = AdamConfig::new().with_beta_1(0.5).init();
        let mut discriminators_optimizer =
            RmsPropConfig::new().with_grad_clipping(Some(GradientClippingConfig::Value(0.01))).init();
        let loss_fn = BinaryCrossEntropyLossConfig::new().with_logits(true).init(device);
        for step in 0..NUM_STEPS {
            let real = floats::<B, 2>(step, [10, NUM_FEATURES], device);
            let noise = Tensor::<B, 2>::random([10, NUM_LATENT], Distribution::Normal(0.0, 1.0), device);
            let fake = generator.forward(noise);

            let apart =
                discriminator.loss(real, true, &loss_fn) + discriminator.loss(fake.clone().detach(), false, &loss_fn);
            let grads = GradientsParams::from_grads(apart.backward(), &discriminator);
            discriminator = discriminators_optimizer.step(1e-3, discriminator, grads);

            let fooled = discriminator.loss(fake, true, &loss_fn);
            let grads = GradientsParams::from_grads(fooled.backward(), &generator);
            generator = generators_optimizer.step(1e-3, generator, grads);
            journal.step([apart, fooled]);
        }
        journal.finish_optimizer::<B, Generator<B>, _>(&generators_optimizer, device);
        journal.finish_optimizer::<B, Discriminator<B>, _>(&discriminators_optimizer, device);
        journal.finish::<B, _, 2>(&generator, |model| model.forward(floats(99, [6, NUM_LATENT], device)));
        journal.finish::<B, _, 2>(&discriminator, |model| model.forward(floats(98, [6, NUM_FEATURES], device)));
    }
}

#[test]
fn a_gan_trains_as_on_one_device() {
    // One per optimizer; the losses are formed with the gradients.
    equals_one_device::<TrainGan>(Expected::new(2));
}

struct TrainVae;

impl Program for TrainVae {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let model =
            fit::<B, _, _>(journal, Vae::new(20, 16, 4, device), AdamConfig::new().init(), 1e-3, |model, step| {
                model.loss(floats::<B, 2>(step, [9, 20], device).abs())
            });
        journal.finish::<B, _, 2>(&model, |model| {
            let (mean, _) = model.encode(floats(99, [6, 20], device).abs());
            model.decode(mean)
        });
    }
}

#[test]
fn a_vae_trains_as_on_one_device() {
    equals_one_device::<TrainVae>(Expected::new(1));
}

struct TrainAutoencoder;

impl Program for TrainAutoencoder {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let optimizer = AdamConfig::new().init();
        let model = fit::<B, _, _>(journal, Autoencoder::new([2, 4, 6], device), optimizer, 1e-3, |model, step| {
            let x = floats::<B, 3>(step, [9, 2, 24], device);
            MseLoss::new().forward(model.forward(x.clone()), x, Reduction::Mean)
        });
        journal.finish::<B, _, 3>(&model, |model| model.forward(floats(99, [5, 2, 16], device)));
    }
}

#[test]
fn an_autoencoder_trains_as_on_one_device() {
    equals_one_device::<TrainAutoencoder>(Expected::new(1));
}
