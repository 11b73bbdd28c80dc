//! LSTM and GRU models.

use burn::{
    module::Module,
    nn::{BiLstm, BiLstmConfig, Gru, GruConfig, Linear, LinearConfig, Lstm, LstmConfig},
    tensor::{Tensor, backend::Backend},
};

/// An LSTM, a bidirectional one, and a linear layer on the last item.
#[derive(Module, Debug)]
pub struct LstmModel<B: Backend> {
    lstm: Lstm<B>,
    both_ways: BiLstm<B>,
    output: Linear<B>,
}

impl<B: Backend> LstmModel<B> {
    /// `width` is even.
    pub fn new(num_features: usize, width: usize, device: &B::Device) -> Self {
        Self {
            lstm: LstmConfig::new(num_features, width, true).init(device),
            both_ways: BiLstmConfig::new(width, width / 2, true).init(device),
            output: LinearConfig::new(width, 2).init(device),
        }
    }

    /// `[batch, seq, features]` to `[batch, 2]`, from the last item.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 2> {
        let (x, _) = self.lstm.forward(x, None);
        let (x, _) = self.both_ways.forward(x, None);
        let [batch_size, seq_length, width] = x.dims();
        self.output.forward(x.slice([0..batch_size, seq_length - 1..seq_length]).reshape([batch_size, width]))
    }
}

/// A GRU with a linear layer on each item.
#[derive(Module, Debug)]
pub struct GruModel<B: Backend> {
    gru: Gru<B>,
    output: Linear<B>,
}

impl<B: Backend> GruModel<B> {
    pub fn new(num_features: usize, width: usize, device: &B::Device) -> Self {
        Self {
            gru: GruConfig::new(num_features, width, true).init(device),
            output: LinearConfig::new(width, num_features).init(device),
        }
    }

    /// `[batch, seq, features]` to a prediction of the next item for each.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.output.forward(self.gru.forward(x, None))
    }
}
