//! A GAN with two optimizers, a VAE that draws in its forward pass, an autoencoder of sequences.

use burn::{
    grad_clipping::GradientClippingConfig,
    module::Module,
    nn::{
        Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PaddingConfig1d, Relu,
        conv::{Conv1d, Conv1dConfig, ConvTranspose1d, ConvTranspose1dConfig},
        loss::{BinaryCrossEntropyLoss, BinaryCrossEntropyLossConfig, MseLoss, Reduction},
    },
    optim::{AdamConfig, GradientsParams, Optimizer, RmsPropConfig},
    tensor::{
        Distribution, Int, Tensor,
        activation::{sigmoid, tanh},
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::floats,
    journal::{Journal, NUM_STEPS, Program, fit},
    parity::{Expected, equals_one_device},
};

#[derive(Module, Debug)]
struct Generator<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

#[derive(Module, Debug)]
struct Discriminator<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    activation: LeakyRelu,
    dropout: Dropout,
}

const NUM_LATENT: usize = 5;
const NUM_FEATURES: usize = 12;

impl<B: Backend> Generator<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(NUM_LATENT, 16).init(device),
            output: LinearConfig::new(16, NUM_FEATURES).init(device),
            relu: Relu::new(),
        }
    }

    fn forward(&self, noise: Tensor<B, 2>) -> Tensor<B, 2> {
        tanh(self.output.forward(self.relu.forward(self.hidden.forward(noise))))
    }
}

impl<B: Backend> Discriminator<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(NUM_FEATURES, 16).init(device),
            output: LinearConfig::new(16, 1).init(device),
            activation: LeakyReluConfig::new().with_negative_slope(0.2).init(),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    fn forward(&self, samples: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.activation.forward(self.hidden.forward(samples));
        self.output.forward(self.dropout.forward(x))
    }

    /// How wrong it is if all samples are real, or all are not.
    fn loss(&self, samples: Tensor<B, 2>, real: bool, loss_fn: &BinaryCrossEntropyLoss<B>) -> Tensor<B, 1> {
        let logits = self.forward(samples);
        let (shape, device) = (logits.shape(), logits.device());
        let labels = if real { Tensor::<B, 2, Int>::ones(shape, &device) } else { Tensor::zeros(shape, &device) };
        loss_fn.forward(logits, labels)
    }
}

struct TrainGan;

impl Program for TrainGan {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut generator = Generator::<B>::new(device);
        let mut discriminator = Discriminator::<B>::new(device);
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

#[derive(Module, Debug)]
struct Vae<B: Backend> {
    encoder: Linear<B>,
    mean: Linear<B>,
    log_variance: Linear<B>,
    decoder: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Vae<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            encoder: LinearConfig::new(20, 16).init(device),
            mean: LinearConfig::new(16, 4).init(device),
            log_variance: LinearConfig::new(16, 4).init(device),
            decoder: LinearConfig::new(4, 16).init(device),
            output: LinearConfig::new(16, 20).init(device),
            relu: Relu::new(),
        }
    }

    fn encode(&self, x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let hidden = self.relu.forward(self.encoder.forward(x));
        (self.mean.forward(hidden.clone()), self.log_variance.forward(hidden))
    }

    fn decode(&self, latent: Tensor<B, 2>) -> Tensor<B, 2> {
        sigmoid(self.output.forward(self.relu.forward(self.decoder.forward(latent))))
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let num_items = x.dims()[0] as f32;
        let (mean, log_variance) = self.encode(x.clone());
        let noise = mean.random_like(Distribution::Normal(0.0, 1.0));
        let latent = mean.clone() + (log_variance.clone() * 0.5).exp() * noise;
        let error = MseLoss::new().forward(self.decode(latent), x, Reduction::Sum);
        let divergence = (mean.powi_scalar(2) + log_variance.clone().exp() - log_variance - 1.0).sum() * 0.5;
        (error + divergence) / num_items
    }
}

struct TrainVae;

impl Program for TrainVae {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let model = fit::<B, _, _>(journal, Vae::new(device), AdamConfig::new().init(), 1e-3, |model, step| {
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

#[derive(Module, Debug)]
struct Autoencoder<B: Backend> {
    encoder: [Conv1d<B>; 2],
    decoder: [ConvTranspose1d<B>; 2],
    relu: Relu,
}

impl<B: Backend> Autoencoder<B> {
    fn new(device: &B::Device) -> Self {
        let down = |from, to| {
            let config = Conv1dConfig::new(from, to, 3).with_stride(2);
            config.with_padding(PaddingConfig1d::Explicit(1, 1)).init(device)
        };
        let up = |channels| {
            let config = ConvTranspose1dConfig::new(channels, 3).with_stride(2).with_padding(1);
            config.with_padding_out(1).init(device)
        };
        Self { encoder: [down(2, 4), down(4, 6)], decoder: [up([6, 4]), up([4, 2])], relu: Relu::new() }
    }

    /// `[batch, 2, length]` to the same, for a length that 4 divides.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [down1, down2] = &self.encoder;
        let [up1, up2] = &self.decoder;
        let code = self.relu.forward(down2.forward(self.relu.forward(down1.forward(x))));
        up2.forward(self.relu.forward(up1.forward(code)))
    }
}

struct TrainAutoencoder;

impl Program for TrainAutoencoder {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let optimizer = AdamConfig::new().init();
        let model = fit::<B, _, _>(journal, Autoencoder::new(device), optimizer, 1e-3, |model, step| {
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
