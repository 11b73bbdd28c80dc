//! A GAN's two models, a VAE that draws in its forward pass, an autoencoder of sequences.

use burn::{
    module::Module,
    nn::{
        Dropout, DropoutConfig, LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PaddingConfig1d, Relu,
        conv::{Conv1d, Conv1dConfig, ConvTranspose1d, ConvTranspose1dConfig},
        loss::{BinaryCrossEntropyLoss, MseLoss, Reduction},
    },
    tensor::{
        Distribution, Int, Tensor,
        activation::{sigmoid, tanh},
        backend::Backend,
    },
};

/// Makes samples from noise.
#[derive(Module, Debug)]
pub struct Generator<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

/// Tells real samples from made ones.
#[derive(Module, Debug)]
pub struct Discriminator<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
    activation: LeakyRelu,
    dropout: Dropout,
}

impl<B: Backend> Generator<B> {
    pub fn new(num_latent: usize, width: usize, num_features: usize, device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(num_latent, width).init(device),
            output: LinearConfig::new(width, num_features).init(device),
            relu: Relu::new(),
        }
    }

    pub fn forward(&self, noise: Tensor<B, 2>) -> Tensor<B, 2> {
        tanh(self.output.forward(self.relu.forward(self.hidden.forward(noise))))
    }
}

impl<B: Backend> Discriminator<B> {
    pub fn new(num_features: usize, width: usize, device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(num_features, width).init(device),
            output: LinearConfig::new(width, 1).init(device),
            activation: LeakyReluConfig::new().with_negative_slope(0.2).init(),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    pub fn forward(&self, samples: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.activation.forward(self.hidden.forward(samples));
        self.output.forward(self.dropout.forward(x))
    }

    /// How wrong it is if all samples are real, or all are not.
    pub fn loss(&self, samples: Tensor<B, 2>, real: bool, loss_fn: &BinaryCrossEntropyLoss<B>) -> Tensor<B, 1> {
        let logits = self.forward(samples);
        let (shape, device) = (logits.shape(), logits.device());
        let labels = if real { Tensor::<B, 2, Int>::ones(shape, &device) } else { Tensor::zeros(shape, &device) };
        loss_fn.forward(logits, labels)
    }
}

/// A variational autoencoder of rows between 0 and 1.
#[derive(Module, Debug)]
pub struct Vae<B: Backend> {
    encoder: Linear<B>,
    mean: Linear<B>,
    log_variance: Linear<B>,
    decoder: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Vae<B> {
    pub fn new(num_features: usize, width: usize, num_latent: usize, device: &B::Device) -> Self {
        Self {
            encoder: LinearConfig::new(num_features, width).init(device),
            mean: LinearConfig::new(width, num_latent).init(device),
            log_variance: LinearConfig::new(width, num_latent).init(device),
            decoder: LinearConfig::new(num_latent, width).init(device),
            output: LinearConfig::new(width, num_features).init(device),
            relu: Relu::new(),
        }
    }

    pub fn encode(&self, x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let hidden = self.relu.forward(self.encoder.forward(x));
        (self.mean.forward(hidden.clone()), self.log_variance.forward(hidden))
    }

    pub fn decode(&self, latent: Tensor<B, 2>) -> Tensor<B, 2> {
        sigmoid(self.output.forward(self.relu.forward(self.decoder.forward(latent))))
    }

    pub fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let num_items = x.dims()[0] as f32;
        let (mean, log_variance) = self.encode(x.clone());
        let noise = mean.random_like(Distribution::Normal(0.0, 1.0));
        let latent = mean.clone() + (log_variance.clone() * 0.5).exp() * noise;
        let error = MseLoss::new().forward(self.decode(latent), x, Reduction::Sum);
        let divergence = (mean.powi_scalar(2) + log_variance.clone().exp() - log_variance - 1.0).sum() * 0.5;
        (error + divergence) / num_items
    }
}

/// Convolutions down twice, and up again.
#[derive(Module, Debug)]
pub struct Autoencoder<B: Backend> {
    encoder: [Conv1d<B>; 2],
    decoder: [ConvTranspose1d<B>; 2],
    relu: Relu,
}

impl<B: Backend> Autoencoder<B> {
    /// `channels` are those of the input and of the two layers of the encoder.
    pub fn new(channels: [usize; 3], device: &B::Device) -> Self {
        let [input, middle, code] = channels;
        let down = |from, to| {
            let config = Conv1dConfig::new(from, to, 3).with_stride(2);
            config.with_padding(PaddingConfig1d::Explicit(1, 1)).init(device)
        };
        let up = |channels| {
            let config = ConvTranspose1dConfig::new(channels, 3).with_stride(2).with_padding(1);
            config.with_padding_out(1).init(device)
        };
        Self {
            encoder: [down(input, middle), down(middle, code)],
            decoder: [up([code, middle]), up([middle, input])],
            relu: Relu::new(),
        }
    }

    /// `[batch, channels, length]` to the same, for a length that 4 divides.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [down1, down2] = &self.encoder;
        let [up1, up2] = &self.decoder;
        let code = self.relu.forward(down2.forward(self.relu.forward(down1.forward(x))));
        up2.forward(self.relu.forward(up1.forward(code)))
    }
}
