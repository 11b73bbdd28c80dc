//! The outputs that `burn-train` brings.

use burn::{
    tensor::{Tensor, TensorData, Transaction, backend::Backend},
    train::{ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput},
};

use super::{GatherOutput, OutputPart};

impl<B: Backend> GatherOutput<B> for () {
    fn into_parts(self) -> Vec<OutputPart> {
        Vec::new()
    }

    fn from_parts(_: Vec<TensorData>, _: &B::Device) -> Self {}
}

/// A loss, then what has a row for each item; the device is waited for once.
fn read<B: Backend>(tensors: Transaction<B>) -> Vec<OutputPart> {
    let mut data = tensors.execute().into_iter();
    data.next().map(OutputPart::Loss).into_iter().chain(data.map(OutputPart::Rows)).collect()
}

const AS_SENT: &str = "as many parts as `into_parts` gave";

/// Outputs that are a loss, values and targets.
macro_rules! three_parts {
    ($($output:ident),*) => {$(
        impl<B: Backend> GatherOutput<B> for $output<B> {
            fn into_parts(self) -> Vec<OutputPart> {
                read(Transaction::default().register(self.loss).register(self.output).register(self.targets))
            }

            fn from_parts(parts: Vec<TensorData>, device: &B::Device) -> Self {
                let [loss, output, targets] = parts.try_into().expect(AS_SENT);
                Self {
                    loss: Tensor::from_data(loss, device),
                    output: Tensor::from_data(output, device),
                    targets: Tensor::from_data(targets, device),
                }
            }
        }
    )*};
}

three_parts!(ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput);

impl<B: Backend> GatherOutput<B> for SequenceOutput<B> {
    fn into_parts(self) -> Vec<OutputPart> {
        let tensors = Transaction::default().register(self.loss).register(self.logits).register(self.targets);
        read(match self.predictions {
            Some(predictions) => tensors.register(predictions),
            None => tensors,
        })
    }

    fn from_parts(parts: Vec<TensorData>, device: &B::Device) -> Self {
        let mut parts = parts.into_iter();
        Self {
            loss: Tensor::from_data(parts.next().expect(AS_SENT), device),
            logits: Tensor::from_data(parts.next().expect(AS_SENT), device),
            targets: Tensor::from_data(parts.next().expect(AS_SENT), device),
            predictions: parts.next().map(|predictions| Tensor::from_data(predictions, device)),
        }
    }
}
