//! LSTM and GRU models.

use burn::{
    grad_clipping::GradientClippingConfig,
    module::Module,
    nn::{
        BiLstm, BiLstmConfig, Gru, GruConfig, Linear, LinearConfig, Lstm, LstmConfig,
        loss::{MseLoss, Reduction},
    },
    optim::{AdamConfig, SgdConfig},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::floats,
    journal::{Journal, Program, fit},
    parity::{Expected, equals_one_device},
};

#[derive(Module, Debug)]
struct LstmModel<B: Backend> {
    lstm: Lstm<B>,
    both_ways: BiLstm<B>,
    output: Linear<B>,
}

impl<B: Backend> LstmModel<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            lstm: LstmConfig::new(3, 8, true).init(device),
            both_ways: BiLstmConfig::new(8, 4, true).init(device),
            output: LinearConfig::new(8, 2).init(device),
        }
    }

    /// `[batch, seq, 3]` to `[batch, 2]`, from the last item.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 2> {
        let (x, _) = self.lstm.forward(x, None);
        let (x, _) = self.both_ways.forward(x, None);
        let [batch_size, seq_length, width] = x.dims();
        self.output.forward(x.slice([0..batch_size, seq_length - 1..seq_length]).reshape([batch_size, width]))
    }
}

struct TrainLstm;

impl Program for TrainLstm {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let clipping = Some(GradientClippingConfig::Norm(0.05));
        let optimizer = AdamConfig::new().with_grad_clipping(clipping).init();
        let model = fit::<B, _, _>(journal, LstmModel::new(device), optimizer, 1e-3, |model, step| {
            let target = floats(step + 100, [7, 2], device);
            MseLoss::new().forward(model.forward(floats(step, [7, 5, 3], device)), target, Reduction::Mean)
        });
        journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [5, 4, 3], device)));
    }
}

#[test]
fn an_lstm_trains_as_on_one_device() {
    equals_one_device::<TrainLstm>(Expected::new(1));
}

#[derive(Module, Debug)]
struct GruModel<B: Backend> {
    gru: Gru<B>,
    output: Linear<B>,
}

impl<B: Backend> GruModel<B> {
    fn new(device: &B::Device) -> Self {
        Self { gru: GruConfig::new(3, 8, true).init(device), output: LinearConfig::new(8, 3).init(device) }
    }

    /// `[batch, seq, 3]` to a prediction of the next item for each.
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        self.output.forward(self.gru.forward(x, None))
    }
}

struct TrainGru;

impl Program for TrainGru {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let clipping = Some(GradientClippingConfig::Value(0.01));
        let optimizer = SgdConfig::new().with_gradient_clipping(clipping).init();
        let model = fit::<B, _, _>(journal, GruModel::new(device), optimizer, 0.1, |model, step| {
            let x = floats::<B, 3>(step, [7, 6, 3], device);
            let prediction = model.forward(x.clone().narrow(1, 0, 5));
            MseLoss::new().forward(prediction, x.narrow(1, 1, 5), Reduction::Mean)
        });
        journal.finish::<B, _, 3>(&model, |model| model.forward(floats(99, [5, 4, 3], device)));
    }
}

#[test]
fn a_gru_trains_as_on_one_device() {
    equals_one_device::<TrainGru>(Expected::new(1));
}
