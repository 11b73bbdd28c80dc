//! Convolutions: every member computes its part of the batch.

use bonfire_placement::{Role, Yield};
use burn_backend::{MetadataError, Shape, TensorMetadata};

use super::*;
use crate::{Member, ReplicaTensor, value::Float};

/// The dim that spatial operations share.
pub(super) const BATCH: [usize; 1] = [0];

/// The gradients of a convolution's weight and bias. `$counted` is the one of two shapes whose elements each meet a filter.
macro_rules! conv_gradients {
    ($options:ty, |$x:ident, $output_grad:ident| $counted:ident: $weight_backward:ident $bias_backward:ident) => {
        fn $weight_backward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
            options: $options,
        ) -> FloatTensor<Self> {
            let [$x, $output_grad] = [x.shape(), output_grad.shape()];
            let work = conv_work(&Ok($counted), &weight.shape());
            let body = move |x, w, g| B::$weight_backward(x, w, g, options.clone());
            weight_gradient(stringify!($weight_backward), x, weight, output_grad, work, body)
        }

        fn $bias_backward(
            x: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            weight_gradient(stringify!($bias_backward), x, bias, output_grad, 0, B::$bias_backward)
        }
    };
}

/// A convolution of `$num_dims` dims with its backward operations.
macro_rules! conv {
    ($num_dims:literal: $forward:ident $x_backward:ident $weight_backward:ident $bias_backward:ident) => {
        fn $forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: Option<FloatTensor<Self>>,
            options: ConvOptions<$num_dims>,
        ) -> FloatTensor<Self> {
            let ConvOptions { stride, padding, dilation, .. } = &options;
            let fits = length(&x.shape(), 1) == length(&weight.shape(), 1) * options.groups
                && bias_fits(&bias, length(&weight.shape(), 0))
                && x.dtype() == weight.dtype();
            let shape = match fits {
                true => calculate_conv_output_shape(&x.shape(), &weight.shape(), stride, padding, dilation),
                false => Err(MetadataError::IncompatibleShapes { left: x.shape(), right: weight.shape() }),
            };
            let work = conv_work(&shape, &weight.shape());
            conv_forward(stringify!($forward), x, weight, bias, shape, work, move |x, w, b| {
                B::$forward(x, w, b, options.clone())
            })
        }

        fn $x_backward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
            options: ConvOptions<$num_dims>,
        ) -> FloatTensor<Self> {
            let spec = Spec::new(x.shape(), x.dtype());
            let work = conv_work(&Ok(output_grad.shape()), &weight.shape());
            let roles = vec![Role::Split, Role::Whole, Role::Split];
            apply(
                Call::heavy(stringify!($x_backward), work),
                (x, weight, output_grad),
                |_| (Rule::new(batch_shared(BATCH.into(), roles, vec![Yield::Split])), spec),
                move |(x, w, g), _| B::$x_backward(x, w, g, options.clone()),
            )
        }

        conv_gradients!(ConvOptions<$num_dims>, |_x, output_grad| output_grad: $weight_backward $bias_backward);
    };
}

/// As [`conv`], transposed.
macro_rules! conv_transpose {
    ($num_dims:literal: $forward:ident $x_backward:ident $weight_backward:ident $bias_backward:ident) => {
        fn $forward(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: Option<FloatTensor<Self>>,
            options: ConvTransposeOptions<$num_dims>,
        ) -> FloatTensor<Self> {
            let ConvTransposeOptions { stride, padding, padding_out, dilation, groups } = &options;
            let fits = x.shape().get(1) == weight.shape().first()
                && bias_fits(&bias, length(&weight.shape(), 1) * groups)
                && x.dtype() == weight.dtype();
            let shape = match fits {
                true => calculate_conv_transpose_output_shape(
                    &x.shape(),
                    &weight.shape(),
                    stride,
                    padding,
                    padding_out,
                    dilation,
                    *groups,
                ),
                false => Err(MetadataError::IncompatibleShapes { left: x.shape(), right: weight.shape() }),
            };
            let work = conv_work(&Ok(x.shape()), &weight.shape());
            conv_forward(stringify!($forward), x, weight, bias, shape, work, move |x, w, b| {
                B::$forward(x, w, b, options.clone())
            })
        }

        fn $x_backward(
            weight: FloatTensor<Self>,
            output_grad: FloatTensor<Self>,
            options: ConvTransposeOptions<$num_dims>,
        ) -> FloatTensor<Self> {
            // The gradient of a transposed convolution is the plain convolution of the output's gradient.
            let mut shape = output_grad.shape();
            for (dim, length) in shape.iter_mut().enumerate().skip(2) {
                // What `padding_out` added at the end is no part of the input.
                let [kernel, index] = [weight.shape()[dim], dim - 2];
                let (stride, padding, dilation) =
                    (options.stride[index], options.padding[index], options.dilation[index]);
                let length_without = length.saturating_sub(options.padding_out[index]);
                *length = calculate_conv_output_size(kernel, stride, padding, dilation, length_without);
            }
            shape[1] = weight.shape()[0];
            let work = conv_work(&Ok(shape.clone()), &weight.shape());
            let spec = Spec::new(shape, output_grad.dtype());
            let roles = vec![Role::Whole, Role::Split];
            apply(
                Call::heavy(stringify!($x_backward), work),
                (weight, output_grad),
                |_| (Rule::new(batch_shared(BATCH.into(), roles, vec![Yield::Split])), spec),
                move |(w, g), _| B::$x_backward(w, g, options.clone()),
            )
        }

        conv_gradients!(ConvTransposeOptions<$num_dims>, |x, _output_grad| x: $weight_backward $bias_backward);
    };
}

/// Multiply-adds: each output element meets one filter.
pub(super) fn conv_work(output: &Result<Shape, MetadataError>, weight: &Shape) -> usize {
    let filter: usize = weight.iter().skip(1).product();
    output.as_ref().map_or(0, |shape| shape.num_elements() * filter)
}

pub(super) fn conv_forward<B: Member>(
    name: &'static str,
    x: ReplicaTensor<B, Float>,
    weight: ReplicaTensor<B, Float>,
    bias: Option<ReplicaTensor<B, Float>>,
    shape: Result<Shape, MetadataError>,
    work: usize,
    body: impl Fn(
        B::FloatTensorPrimitive,
        B::FloatTensorPrimitive,
        Option<B::FloatTensorPrimitive>,
    ) -> B::FloatTensorPrimitive
    + Send
    + Sync
    + 'static,
) -> ReplicaTensor<B, Float> {
    let mut roles = vec![Role::Split, Role::Whole];
    roles.extend(bias.as_ref().map(|_| Role::Whole));
    let spec = Spec::inferred(shape, x.dtype());
    apply(
        Call::heavy(name, work),
        (x, weight, bias),
        |_| (Rule::new(batch_shared(BATCH.into(), roles, vec![Yield::Split])), spec),
        move |(x, w, b), _| body(x, w, b),
    )
}

/// The gradient of a weight or bias: each member's share of the batch gives a part of the sum.
pub(super) fn weight_gradient<B: Member>(
    name: &'static str,
    x: ReplicaTensor<B, Float>,
    weight: ReplicaTensor<B, Float>,
    output_grad: ReplicaTensor<B, Float>,
    work: usize,
    body: impl Fn(B::FloatTensorPrimitive, B::FloatTensorPrimitive, B::FloatTensorPrimitive) -> B::FloatTensorPrimitive
    + Send
    + Sync
    + 'static,
) -> ReplicaTensor<B, Float> {
    let spec = Spec::new(weight.shape(), weight.dtype());
    let roles = vec![Role::Split, Role::Whole, Role::Split];
    apply(
        Call::heavy(name, work),
        (x, weight, output_grad),
        |_| (Rule::new(batch_shared(BATCH.into(), roles, vec![Yield::Sum])), spec),
        move |(x, w, g), _| body(x, w, g),
    )
}
