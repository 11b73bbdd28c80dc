//! A batch normalised over all ranks, as an operation that autodiff runs backward.
//!
//! With sums over the items (and positions) of all ranks, per channel, and `n` their number:
//!
//! ```text
//! forward   m = sum(x) / n,  v = sum(x^2) / n - m^2,  y = (x - m) / sqrt(v + epsilon)
//! backward  dx = (dy - sum(dy) / n - y * sum(dy * y) / n) / sqrt(v + epsilon)
//! ```
//!
//! Each rank has the gradient of its own loss. That of the mean over ranks is wanted, in units of this rank's loss: sums
//! in backward are taken with the loss weight `w` of each rank, and divided by this rank's.

use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor};

use super::{
    group::{LossWeight, Part, Pass, Rounds},
    vector,
};
use crate::{HookBackend, TrainError};

/// A layer, in training.
pub(super) struct Layer {
    pub(super) rounds: Arc<Rounds>,
    pub(super) index: usize,
    pub(super) epsilon: f64,
}

/// A batch of mean 0 and variance 1, and what these were.
pub(super) struct Normalised<B: Backend> {
    pub(super) output: FloatTensor<B>,
    /// Mean and biased variance by channel, the same on every rank; none if no rank has an item.
    pub(super) statistics: Option<[Vec<f64>; 2]>,
}

/// Normalises `[items, channels, positions]`.
pub(super) type Normalise<B> = fn(Layer, FloatTensor<B>) -> Result<Normalised<B>, TrainError>;

pub(super) fn normalise<B: HookBackend>(layer: Layer, input: FloatTensor<B>) -> Result<Normalised<B>, TrainError> {
    let x = tensor::<B::InnerBackend>(B::inner(input.clone()));
    let dtype = x.dtype();
    let x = widened(x);
    let [num_items, num_channels, num_positions] = x.dims();
    let count = (num_items * num_positions) as f64;
    let weight = match layer.rounds.loss_weight() {
        LossWeight::Items => num_items as f64,
        LossWeight::Of(weight) => weight,
    };
    let values = if count > 0.0 { sums_of(&x)? } else { vec![0.0; 2 * num_channels] };
    let sums = layer.rounds.run(Part::Layer { index: layer.index, pass: Pass::Forward, count, values })?;
    let total = sums.count;
    if total == 0.0 {
        return Ok(Normalised { output: input, statistics: None });
    }
    let mean: Vec<f64> = sums.values[..num_channels].iter().map(|sum| sum / total).collect();
    let squares = &sums.values[num_channels..];
    let variance: Vec<f64> =
        squares.iter().zip(&mean).map(|(sum, mean)| (sum / total - mean * mean).max(0.0)).collect();
    let deviation: Vec<f64> = variance.iter().map(|variance| (variance + layer.epsilon).sqrt()).collect();

    let channels =
        |values: Vec<f64>| vector::<B::InnerBackend>(values, x.dtype(), &x.device()).reshape([1, num_channels, 1]);
    let deviation = channels(deviation);
    let y = if count > 0.0 { x.clone().sub(channels(mean.clone())).div(deviation.clone()) } else { x };
    let output = narrowed(y.clone(), dtype);
    let back = Back::<B::InnerBackend> { layer, y: primitive(y), deviation: primitive(deviation), weight, total };
    let backward = move |gradient| back.run(gradient).unwrap_or_else(|error| panic!("{error}"));
    let output = B::function(input, primitive(output), Arc::new(backward));
    Ok(Normalised { output, statistics: Some([mean, variance]) })
}

/// What backward needs.
struct Back<I: Backend> {
    layer: Layer,
    y: FloatTensor<I>,
    /// `[1, channels, 1]`
    deviation: FloatTensor<I>,
    weight: f64,
    /// Items times positions, of all ranks.
    total: f64,
}

impl<I: Backend> Back<I> {
    fn run(&self, gradient: FloatTensor<I>) -> Result<FloatTensor<I>, TrainError> {
        let gradient = tensor::<I>(gradient);
        let (dtype, device) = (gradient.dtype(), gradient.device());
        let (gradient, y) = (widened(gradient), tensor::<I>(self.y.clone()));
        let [num_items, num_channels, num_positions] = y.dims();
        let is_empty = num_items * num_positions == 0;
        let values = if is_empty {
            vec![0.0; 2 * num_channels]
        } else {
            let sums = [sum_by_channel(gradient.clone()), sum_by_channel(gradient.clone().mul(y.clone()))];
            read(sums)?.into_iter().map(|sum| sum * self.weight).collect()
        };
        let (index, pass, count) = (self.layer.index, Pass::Backward, self.weight);
        let mut sums = self.layer.rounds.run(Part::Layer { index, pass, count, values })?.values;
        if is_empty {
            return Ok(primitive(narrowed(gradient, dtype)));
        }
        // A loss that counts nothing has no gradient to bring into its units.
        let scale = if self.weight == 0.0 { 0.0 } else { 1.0 / (self.weight * self.total) };
        for sum in &mut sums {
            *sum *= scale;
        }
        let products = sums.split_off(num_channels);
        let channels = |values: Vec<f64>| vector::<I>(values, y.dtype(), &device).reshape([1, num_channels, 1]);
        let centred = gradient.sub(channels(sums)).sub(y.clone().mul(channels(products)));
        Ok(primitive(narrowed(centred.div(tensor::<I>(self.deviation.clone())), dtype)))
    }
}

/// Sums of values and of squares, by channel, by way of the rank's own mean: squares of large values would lose the rest.
fn sums_of<I: Backend>(x: &Tensor<I, 3>) -> Result<Vec<f64>, TrainError> {
    let [num_items, num_channels, num_positions] = x.dims();
    let count = num_items * num_positions;
    let mean = sum_by_channel(x.clone()).div_scalar(count as f64);
    let deviations = x.clone().sub(mean.clone().reshape([1, num_channels, 1]));
    let mut values = read([mean, sum_by_channel(deviations.square())])?;
    let count = count as f64;
    let (means, squares) = values.split_at_mut(num_channels);
    for (mean, square) in means.iter_mut().zip(squares) {
        *square += count * *mean * *mean;
        *mean *= count;
    }
    Ok(values)
}

/// `[items, channels, positions]` to `[channels]`.
fn sum_by_channel<I: Backend>(x: Tensor<I, 3>) -> Tensor<I, 1> {
    let [num_items, num_channels, num_positions] = x.dims();
    x.swap_dims(0, 1).reshape([num_channels, num_items * num_positions]).sum_dim(1).reshape([num_channels])
}

/// Both, read at once.
fn read<I: Backend>(sums: [Tensor<I, 1>; 2]) -> Result<Vec<f64>, TrainError> {
    let data = Tensor::cat(sums.into(), 0).try_into_data();
    let data = data.map_err(|error| TrainError::Read {
        parameter: "statistics of a batch norm".into(),
        reason: format!("{error:?}"),
    })?;
    Ok(data.iter::<f64>().collect())
}

/// Halves as f32: sums over a batch would overflow.
fn widened<I: Backend, const D: usize>(x: Tensor<I, D>) -> Tensor<I, D> {
    if matches!(x.dtype(), DType::F16 | DType::BF16) { x.cast(FloatDType::F32) } else { x }
}

fn narrowed<I: Backend, const D: usize>(x: Tensor<I, D>, dtype: DType) -> Tensor<I, D> {
    if x.dtype() == dtype { x } else { x.cast(FloatDType::from(dtype)) }
}

fn tensor<I: Backend>(primitive: FloatTensor<I>) -> Tensor<I, 3> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn primitive<I: Backend>(tensor: Tensor<I, 3>) -> FloatTensor<I> {
    tensor.into_primitive().tensor()
}
