//! LSTM and GRU models.

use bonfire_tests::sequences::{GruModel, LstmModel};
use burn::{
    grad_clipping::GradientClippingConfig,
    nn::loss::{MseLoss, Reduction},
    optim::{AdamConfig, SgdConfig},
    tensor::backend::AutodiffBackend,
};

use super::{
    data::floats,
    journal::{Journal, Program, fit},
    parity::{Expected, equals_one_device},
};

struct TrainLstm;

impl Program for TrainLstm {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let clipping = Some(GradientClippingConfig::Norm(0.05));
        let optimizer = AdamConfig::new().with_grad_clipping(clipping).init();
        let model = fit::<B, _, _>(journal, LstmModel::new(3, 8, device), optimizer, 1e-3, |model, step| {
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

struct TrainGru;

impl Program for TrainGru {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let clipping = Some(GradientClippingConfig::Value(0.01));
        let optimizer = SgdConfig::new().with_gradient_clipping(clipping).init();
        let model = fit::<B, _, _>(journal, GruModel::new(3, 8, device), optimizer, 0.1, |model, step| {
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
