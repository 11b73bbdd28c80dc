//! What is trained: models of the tests' zoo in sizes that take a while, and small ones.

mod small;

use bonfire_tests::{
    generative::{Autoencoder, Vae},
    images::{LeNet, ResNet, UNet},
    sequences::{GruModel, LstmModel},
    text::{Gpt, TextClassifier, TextConfig},
};
use burn::{
    module::AutodiffModule,
    nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig, MseLoss, Reduction},
    tensor::{Int, Tensor, TensorData, backend::AutodiffBackend},
};

/// A model with its loss and the host data of a step.
pub trait Subject: 'static {
    /// The model on a backend.
    type Model<B: AutodiffBackend>: AutodiffModule<B> + 'static;
    fn init<B: AutodiffBackend>(device: &B::Device) -> Self::Model<B>;
    fn batch(batch_size: usize) -> Vec<TensorData>;
    fn loss<B: AutodiffBackend>(model: &Self::Model<B>, batch: &[TensorData], device: &B::Device) -> Tensor<B, 1>;
}

/// Numbers from 0 to 1.
fn floats<const D: usize>(shape: [usize; D]) -> TensorData {
    let num: usize = shape.iter().product();
    TensorData::new((0..num).map(|i| ((i * 31 + 7) % 255) as f32 / 255.0).collect::<Vec<_>>(), shape)
}

/// Integers from 0 to `limit`, which is left out.
fn ints<const D: usize>(shape: [usize; D], limit: usize) -> TensorData {
    let num: usize = shape.iter().product();
    TensorData::new((0..num).map(|i| ((i * 37 + i / 11) % limit) as i32).collect::<Vec<_>>(), shape)
}

fn images(batch_size: usize, channels: usize, side: usize, num_classes: usize) -> Vec<TensorData> {
    vec![floats([batch_size, channels, side, side]), ints([batch_size], num_classes)]
}

fn put<B: AutodiffBackend, const D: usize>(data: &TensorData, device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(data.clone(), device)
}

fn put_ints<B: AutodiffBackend, const D: usize>(data: &TensorData, device: &B::Device) -> Tensor<B, D, Int> {
    Tensor::from_data(data.clone(), device)
}

fn cross_entropy<B: AutodiffBackend>(logits: Tensor<B, 2>, labels: &TensorData) -> Tensor<B, 1> {
    let device = logits.device();
    CrossEntropyLossConfig::new().init(&device).forward(logits, put_ints(labels, &device))
}

fn mean_squares<B: AutodiffBackend, const D: usize>(output: Tensor<B, D>, target: Tensor<B, D>) -> Tensor<B, 1> {
    MseLoss::new().forward(output, target, Reduction::Mean)
}

/// Defines a subject: its model, how it is made, its host data, its loss.
macro_rules! subject {
    ($(#[$doc:meta])* $name:ident, $model:ident, |$init:ident| $make:expr, |$batch_size:ident| $data:expr,
        |$net:ident, $batch:ident, $device:ident| $loss:expr) => {
        $(#[$doc])*
        pub enum $name {}

        impl Subject for $name {
            type Model<B: AutodiffBackend> = $model<B>;

            fn init<B: AutodiffBackend>($init: &B::Device) -> $model<B> {
                $make
            }

            fn batch($batch_size: usize) -> Vec<TensorData> {
                $data
            }

            fn loss<B: AutodiffBackend>($net: &$model<B>, $batch: &[TensorData], $device: &B::Device) -> Tensor<B, 1> {
                $loss
            }
        }
    };
}

use small::Tiny as TinyModel;
pub use small::{Cnn as CnnModel, Mlp as MlpModel};

subject!(
    /// 784-512-10.
    Mlp, MlpModel, |device| MlpModel::new(device), |batch_size| images(batch_size, 1, 28, 10),
    |model, batch, device| cross_entropy(model.forward(put(&batch[0], device)), &batch[1])
);
subject!(
    /// 4-8-3.
    Tiny, TinyModel, |device| TinyModel::new(device), |batch_size| images(batch_size, 1, 2, 3),
    |model, batch, device| cross_entropy(model.forward(put(&batch[0], device)), &batch[1])
);
subject!(
    /// Images of 28 x 28.
    Cnn, CnnModel, |device| CnnModel::new(device), |batch_size| images(batch_size, 1, 28, 10),
    |model, batch, device| cross_entropy(model.forward(put(&batch[0], device)), &batch[1])
);
subject!(
    /// Images of 28 x 28.
    LeNet28, LeNet, |device| LeNet::new(28, device), |batch_size| images(batch_size, 1, 28, 10),
    |model, batch, device| cross_entropy(model.forward(put(&batch[0], device)), &batch[1])
);
subject!(
    /// The paper's channels, images of 32 x 32.
    ResNet18, ResNet, |device| ResNet::new([64, 128, 256, 512], device), |batch_size| images(batch_size, 3, 32, 10),
    |model, batch, device| cross_entropy(model.forward(put(&batch[0], device)), &batch[1])
);
subject!(
    /// A quarter of the paper's channels.
    NarrowResNet18, ResNet, |device| ResNet::new([16, 32, 64, 128], device), |batch_size| images(batch_size, 3, 32, 10),
    |model, batch, device| cross_entropy(model.forward(put(&batch[0], device)), &batch[1])
);
subject!(
    /// 16 channels at 48 x 48.
    UNet48, UNet, |device| UNet::new(16, device),
    |batch_size| vec![floats([batch_size, 1, 48, 48]), ints([batch_size, 1, 48, 48], 2)],
    |model, batch, device| {
        let logits = model.forward(put(&batch[0], device));
        let loss_fn = BinaryCrossEntropyLossConfig::new().with_logits(true).init(device);
        loss_fn.forward(logits, put_ints::<B, 4>(&batch[1], device))
    }
);

const TEXT: TextConfig =
    TextConfig { vocabulary: 1000, max_length: 64, width: 128, num_heads: 4, num_layers: 2, dropout: 0.0 };
const WITH_DROPOUT: TextConfig = TextConfig { dropout: 0.1, ..TEXT };

/// Texts of 64 tokens, of which the last quarter is padding.
fn texts(batch_size: usize) -> TensorData {
    let tokens = (0..batch_size * 64).map(|i| if i % 64 < 48 { (i * 37 + i / 11) as i32 % 999 + 1 } else { 0 });
    TensorData::new(tokens.collect::<Vec<_>>(), [batch_size, 64])
}

subject!(
    /// Two layers of 128, no dropout.
    Transformer, TextClassifier, |device| TextClassifier::new(&TEXT, device),
    |batch_size| vec![texts(batch_size), ints([batch_size], 4)],
    |model, batch, device| cross_entropy(model.forward(put_ints(&batch[0], device)), &batch[1])
);
subject!(
    /// The same with a dropout of 0.1.
    TransformerWithDropout, TextClassifier, |device| TextClassifier::new(&WITH_DROPOUT, device),
    |batch_size| vec![texts(batch_size), ints([batch_size], 4)],
    |model, batch, device| cross_entropy(model.forward(put_ints(&batch[0], device)), &batch[1])
);
subject!(
    /// Two layers of 128, no dropout.
    SmallGpt, Gpt, |device| Gpt::new(&TEXT, device), |batch_size| vec![ints([batch_size, 64], 1000)],
    |model, batch, device| model.loss(put_ints(&batch[0], device))
);
subject!(
    /// An LSTM of 64 and a bidirectional one of 32 each way, sequences of 24.
    Lstm, LstmModel, |device| LstmModel::new(16, 64, device),
    |batch_size| vec![floats([batch_size, 24, 16]), floats([batch_size, 2])],
    |model, batch, device| mean_squares(model.forward(put(&batch[0], device)), put(&batch[1], device))
);
subject!(
    /// A GRU of 64, sequences of 24.
    Gru, GruModel, |device| GruModel::new(16, 64, device), |batch_size| vec![floats([batch_size, 24, 16])],
    |model, batch, device| {
        let x: Tensor<B, 3> = put(&batch[0], device);
        mean_squares(model.forward(x.clone().narrow(1, 0, 23)), x.narrow(1, 1, 23))
    }
);
subject!(
    /// 784-256-32 and back.
    Vae784, Vae, |device| Vae::new(784, 256, 32, device), |batch_size| vec![floats([batch_size, 784])],
    |model, batch, device| model.loss(put(&batch[0], device))
);
subject!(
    /// 8, 32 and 64 channels, sequences of 256.
    Autoencoder256, Autoencoder, |device| Autoencoder::new([8, 32, 64], device),
    |batch_size| vec![floats([batch_size, 8, 256])],
    |model, batch, device| {
        let x: Tensor<B, 3> = put(&batch[0], device);
        mean_squares(model.forward(x.clone()), x)
    }
);
