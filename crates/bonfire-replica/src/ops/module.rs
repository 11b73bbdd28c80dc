use bonfire_placement::{Op, Role, Yield};
use burn_backend::{
    MetadataError, Shape, TensorMetadata,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward, DeformConvOptions,
        InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward, MaxPool2dWithIndices,
        ModuleOps, UnfoldOptions,
        conv::{calculate_conv_output_shape, calculate_conv_output_size, calculate_conv_transpose_output_shape},
    },
    tensor::{BoolTensor, FloatTensor, IntTensor},
};

use super::{convolution::*, pooling::*, *};
use crate::{Member, Replica, ReplicaTensor, value::Float};

impl<B: Member> ModuleOps<Self> for Replica<B> {
    fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        let width = length(&weights.shape(), 1);
        let mut shape = indices.shape();
        shape.push(width);
        let work = shape.num_elements();
        let spec = Spec::new(shape, weights.dtype());
        // One row of indices is positions, say, which meet a whole batch: its own dim is followed, not chosen.
        let dims = if shared_dim(&indices).is_some() { vec![0, 1] } else { vec![0] };
        let op = batch_shared(dims, vec![Role::Whole, Role::Split], vec![Yield::Split]);
        apply(
            Call::heavy("embedding", work),
            (weights, indices),
            |_| (Rule::new(op), spec),
            |(w, i), _| B::embedding(w, i),
        )
    }

    fn embedding_backward(
        weights: FloatTensor<Self>,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let spec = Spec::new(weights.shape(), weights.dtype());
        let op = batch_shared(vec![0, 1], vec![Role::Whole, Role::Split, Role::Split], vec![Yield::Sum]);
        apply(
            Call::light("embedding_backward"),
            (weights, output_grad, indices),
            |_| (Rule::new(op).linear_in(1), spec),
            |(w, g, i), _| B::embedding_backward(w, g, i),
        )
    }

    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        let work = x.shape().num_elements() * length(&weight.shape(), 1);
        apply(
            Call::heavy("linear", work),
            (x, weight, bias),
            |(x, weight, bias)| {
                let (shape, inner) = (x.shape(), last(x));
                let rows = rows_of(&shape);
                let shape = match weight.shape()[..] {
                    [inputs, outputs] if inputs == inner && bias_fits(bias, outputs) && x.dtype() == weight.dtype() => {
                        with_length(shape, rows.len(), outputs)
                    }
                    _ => Err(MetadataError::IncompatibleShapes { left: shape, right: weight.shape() }),
                };
                let mut roles = vec![Role::Split, Role::Whole];
                roles.extend(bias.as_ref().map(|_| Role::Whole));
                (Rule::new(batch_shared(rows, roles, vec![Yield::Split])), Spec::inferred(shape, x.dtype()))
            },
            |(x, w, b), _| B::linear(x, w, b),
        )
    }

    fn linear_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let work = output_grad.shape().num_elements() * length(&weight.shape(), 0);
        apply(
            Call::heavy("linear_x_backward", work),
            (weight, output_grad),
            |(weight, output_grad)| {
                let rows = rows_of(&output_grad.shape());
                let shape = with_length(output_grad.shape(), rows.len(), length(&weight.shape(), 0));
                let op = batch_shared(rows, vec![Role::Whole, Role::Split], vec![Yield::Split]);
                (Rule::new(op), Spec::inferred(shape, output_grad.dtype()))
            },
            |(w, g), _| B::linear_x_backward(w, g),
        )
    }

    fn linear_weight_backward(x: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        let work = x.shape().num_elements() * last(&output_grad);
        apply(
            Call::heavy("linear_weight_backward", work),
            (x, output_grad),
            |(x, output_grad)| {
                let op = batch_shared(rows_of(&x.shape()), vec![Role::Split, Role::Split], vec![Yield::Sum]);
                (Rule::new(op), Spec::new([last(x), last(output_grad)], x.dtype()))
            },
            |(x, g), _| B::linear_weight_backward(x, g),
        )
    }

    fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self> {
        apply(
            Call::light("linear_bias_backward"),
            (output_grad,),
            |(output_grad,)| {
                let op = batch_shared(rows_of(&output_grad.shape()), vec![Role::Split], vec![Yield::Sum]);
                (Rule::new(op), Spec::new([last(output_grad)], output_grad.dtype()))
            },
            |(g,), _| B::linear_bias_backward(g),
        )
    }

    conv!(1: conv1d conv1d_x_backward conv1d_weight_backward conv1d_bias_backward);
    conv!(2: conv2d conv2d_x_backward conv2d_weight_backward conv2d_bias_backward);
    conv!(3: conv3d conv3d_x_backward conv3d_weight_backward conv3d_bias_backward);

    conv_transpose!(1: conv_transpose1d conv_transpose1d_x_backward conv_transpose1d_weight_backward conv_transpose1d_bias_backward);
    conv_transpose!(2: conv_transpose2d conv_transpose2d_x_backward conv_transpose2d_weight_backward conv_transpose2d_bias_backward);
    conv_transpose!(3: conv_transpose3d conv_transpose3d_x_backward conv_transpose3d_weight_backward conv_transpose3d_bias_backward);

    fn deform_conv2d(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        options: DeformConvOptions<2>,
    ) -> FloatTensor<Self> {
        let DeformConvOptions { stride, padding, dilation, .. } = &options;
        let shape = calculate_conv_output_shape(&x.shape(), &weight.shape(), stride, padding, dilation);
        let work = conv_work(&shape, &weight.shape());
        let mut roles = vec![Role::Split, Role::Split, Role::Whole];
        roles.extend(mask.as_ref().map(|_| Role::Split));
        roles.extend(bias.as_ref().map(|_| Role::Whole));
        let spec = Spec::inferred(shape, x.dtype());
        apply(
            Call::heavy("deform_conv2d", work),
            (x, offset, weight, mask, bias),
            |_| (Rule::new(batch_shared(BATCH.into(), roles, vec![Yield::Split])), spec),
            move |(x, o, w, m, b), _| B::deform_conv2d(x, o, w, m, b, options.clone()),
        )
    }

    fn deform_conv2d_backward(
        x: FloatTensor<Self>,
        offset: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mask: Option<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        output_grad: FloatTensor<Self>,
        options: DeformConvOptions<2>,
    ) -> DeformConv2dBackward<Self> {
        let like = |tensor: &FloatTensor<Self>| Spec::new(tensor.shape(), tensor.dtype());
        let work = conv_work(&Ok(output_grad.shape()), &weight.shape());
        let mut specs = vec![like(&x), like(&offset), like(&weight)];
        let mut outputs = vec![Yield::Split, Yield::Split, Yield::Sum];
        let mut roles = vec![Role::Split, Role::Split, Role::Whole];
        if let Some(mask) = &mask {
            specs.push(like(mask));
            outputs.push(Yield::Split);
            roles.push(Role::Split);
        }
        if let Some(bias) = &bias {
            specs.push(like(bias));
            outputs.push(Yield::Sum);
            roles.push(Role::Whole);
        }
        roles.push(Role::Split);
        let (has_mask, has_bias) = (mask.is_some(), bias.is_some());
        let inputs = (x, offset, weight, mask, bias, output_grad);
        let grads: Vec<ReplicaTensor<B, Float>> = apply(
            Call::heavy("deform_conv2d_backward", work),
            inputs,
            |_| (Rule::new(batch_shared(BATCH.into(), roles, outputs)), specs),
            move |(x, o, w, m, b, g), _| {
                let grads = B::deform_conv2d_backward(x, o, w, m, b, g, options.clone());
                let mut list = vec![grads.x_grad, grads.offset_grad, grads.weight_grad];
                list.extend(grads.mask_grad);
                list.extend(grads.bias_grad);
                list
            },
        );
        let mut grads = grads.into_iter();
        let mut next = || grads.next().expect("one gradient per input");
        let (x_grad, offset_grad, weight_grad) = (next(), next(), next());
        let mask_grad = has_mask.then(&mut next);
        let bias_grad = has_bias.then(&mut next);
        DeformConv2dBackward { x_grad, offset_grad, weight_grad, mask_grad, bias_grad }
    }

    fn unfold4d(x: FloatTensor<Self>, kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor<Self> {
        let mut num_windows = 1;
        for index in 0..2 {
            let size = length(&x.shape(), index + 2);
            let UnfoldOptions { stride, padding, dilation } = &options;
            num_windows *=
                calculate_conv_output_size(kernel_size[index], stride[index], padding[index], dilation[index], size);
        }
        let (batch, channels) = (length(&x.shape(), 0), length(&x.shape(), 1));
        let spec = Spec::new([batch, channels * kernel_size[0] * kernel_size[1], num_windows], x.dtype());
        let op = batch_shared(BATCH.into(), vec![Role::Split], vec![Yield::Split]);
        apply(
            Call::light("unfold4d"),
            (x,),
            |_| (Rule::new(op), spec),
            move |(x,), _| B::unfold4d(x, kernel_size, options.clone()),
        )
    }

    fn avg_pool1d(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        count_include_pad: bool,
        ceil_mode: bool,
    ) -> FloatTensor<Self> {
        let shape = pooled(&x.shape(), [kernel_size], [stride], [padding], [1], ceil_mode);
        pool("avg_pool1d", x, shape, move |x| {
            B::avg_pool1d(x, kernel_size, stride, padding, count_include_pad, ceil_mode)
        })
    }

    fn avg_pool1d_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        count_include_pad: bool,
        ceil_mode: bool,
    ) -> FloatTensor<Self> {
        pool_backward("avg_pool1d_backward", x, grad, move |x, g| {
            B::avg_pool1d_backward(x, g, kernel_size, stride, padding, count_include_pad, ceil_mode)
        })
    }

    fn avg_pool2d(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        count_include_pad: bool,
        ceil_mode: bool,
    ) -> FloatTensor<Self> {
        let shape = pooled(&x.shape(), kernel_size, stride, padding, [1, 1], ceil_mode);
        pool("avg_pool2d", x, shape, move |x| {
            B::avg_pool2d(x, kernel_size, stride, padding, count_include_pad, ceil_mode)
        })
    }

    fn avg_pool2d_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        count_include_pad: bool,
        ceil_mode: bool,
    ) -> FloatTensor<Self> {
        pool_backward("avg_pool2d_backward", x, grad, move |x, g| {
            B::avg_pool2d_backward(x, g, kernel_size, stride, padding, count_include_pad, ceil_mode)
        })
    }

    fn adaptive_avg_pool1d(x: FloatTensor<Self>, output_size: usize) -> FloatTensor<Self> {
        let shape = with_length(x.shape(), 2, output_size);
        pool("adaptive_avg_pool1d", x, Some(shape), move |x| B::adaptive_avg_pool1d(x, output_size))
    }

    fn adaptive_avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        pool_backward("adaptive_avg_pool1d_backward", x, grad, B::adaptive_avg_pool1d_backward)
    }

    fn adaptive_avg_pool2d(x: FloatTensor<Self>, output_size: [usize; 2]) -> FloatTensor<Self> {
        let shape = resized(x.shape(), output_size);
        pool("adaptive_avg_pool2d", x, Some(shape), move |x| B::adaptive_avg_pool2d(x, output_size))
    }

    fn adaptive_avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
        pool_backward("adaptive_avg_pool2d_backward", x, grad, B::adaptive_avg_pool2d_backward)
    }

    fn max_pool1d(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> FloatTensor<Self> {
        let shape = pooled(&x.shape(), [kernel_size], [stride], [padding], [dilation], ceil_mode);
        pool("max_pool1d", x, shape, move |x| B::max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode))
    }

    fn max_pool1d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
    ) -> MaxPool1dWithIndices<Self> {
        let shape = pooled(&x.shape(), [kernel_size], [stride], [padding], [dilation], ceil_mode);
        let (output, indices) = pool_with_indices("max_pool1d_with_indices", x, shape, move |x| {
            let pooled = B::max_pool1d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
            (pooled.output, pooled.indices)
        });
        MaxPool1dWithIndices { output, indices }
    }

    fn max_pool1d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: usize,
        stride: usize,
        padding: usize,
        dilation: usize,
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool1dBackward<Self> {
        let body = move |x, g, i| {
            B::max_pool1d_with_indices_backward(x, kernel_size, stride, padding, dilation, ceil_mode, g, i).x_grad
        };
        let x_grad = unpool("max_pool1d_with_indices_backward", x, output_grad, indices, body);
        MaxPool1dBackward { x_grad }
    }

    fn max_pool2d(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> FloatTensor<Self> {
        let shape = pooled(&x.shape(), kernel_size, stride, padding, dilation, ceil_mode);
        pool("max_pool2d", x, shape, move |x| B::max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode))
    }

    fn max_pool2d_with_indices(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
    ) -> MaxPool2dWithIndices<Self> {
        let shape = pooled(&x.shape(), kernel_size, stride, padding, dilation, ceil_mode);
        let (output, indices) = pool_with_indices("max_pool2d_with_indices", x, shape, move |x| {
            let pooled = B::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode);
            (pooled.output, pooled.indices)
        });
        MaxPool2dWithIndices { output, indices }
    }

    fn max_pool2d_with_indices_backward(
        x: FloatTensor<Self>,
        kernel_size: [usize; 2],
        stride: [usize; 2],
        padding: [usize; 2],
        dilation: [usize; 2],
        ceil_mode: bool,
        output_grad: FloatTensor<Self>,
        indices: IntTensor<Self>,
    ) -> MaxPool2dBackward<Self> {
        let body = move |x, g, i| {
            B::max_pool2d_with_indices_backward(x, kernel_size, stride, padding, dilation, ceil_mode, g, i).x_grad
        };
        let x_grad = unpool("max_pool2d_with_indices_backward", x, output_grad, indices, body);
        MaxPool2dBackward { x_grad }
    }

    fn interpolate(x: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor<Self> {
        let shape = resized(x.shape(), output_size);
        pool("interpolate", x, Some(shape), move |x| B::interpolate(x, output_size, options.clone()))
    }

    fn interpolate_backward(
        x: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        output_size: [usize; 2],
        options: InterpolateOptions,
    ) -> FloatTensor<Self> {
        pool_backward("interpolate_backward", x, grad, move |x, g| {
            B::interpolate_backward(x, g, output_size, options.clone())
        })
    }

    fn attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        mask: Option<BoolTensor<Self>>,
        attn_bias: Option<FloatTensor<Self>>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let shape = same_dtype(&[query.dtype(), key.dtype(), value.dtype()])
            .and_then(|()| with_length(query.shape(), 3, length(&value.shape(), 3)));
        let work = 2 * query.shape().num_elements() * length(&key.shape(), 2);
        let mut roles = vec![Role::Split, Role::Split, Role::Split];
        roles.extend(mask.as_ref().map(|_| Role::Split));
        roles.extend(attn_bias.as_ref().map(|_| Role::Split));
        let op = batch_shared(BATCH_OR_CHANNELS.into(), roles, vec![Yield::Split]);
        let spec = Spec::inferred(shape, query.dtype());
        let inputs = (query, key, value, mask, attn_bias);
        apply(
            Call::heavy("attention", work),
            inputs,
            |_| (Rule::new(op), spec),
            move |(q, k, v, m, b), _| B::attention(q, k, v, m, b, options),
        )
    }

    fn layer_norm(
        tensor: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: Option<FloatTensor<Self>>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let rows = rows_of(&tensor.shape());
        let mut roles = vec![Role::Split, Role::Whole];
        roles.extend(beta.as_ref().map(|_| Role::Whole));
        let num_features = last(&tensor);
        let fits = gamma.shape().num_elements() == num_features && bias_fits(&beta, num_features);
        let shape = match fits && tensor.dtype() == gamma.dtype() {
            true => Ok(tensor.shape()),
            false => Err(MetadataError::IncompatibleShapes { left: tensor.shape(), right: gamma.shape() }),
        };
        let spec = Spec::inferred(shape, tensor.dtype());
        apply(
            Call::light("layer_norm"),
            (tensor, gamma, beta),
            |_| (Rule::new(batch_shared(rows, roles, vec![Yield::Split])), spec),
            move |(x, g, b), _| B::layer_norm(x, g, b, epsilon),
        )
    }

    fn ctc_loss(
        log_probs: FloatTensor<Self>,
        targets: IntTensor<Self>,
        input_lengths: IntTensor<Self>,
        target_lengths: IntTensor<Self>,
        blank: usize,
    ) -> FloatTensor<Self> {
        let num_items = length(&log_probs.shape(), 1);
        let per_item = [targets.shape(), input_lengths.shape(), target_lengths.shape()];
        let (op, spec) = match is_per_item(&log_probs, &per_item) {
            true => (
                rows(vec![Some(1), Some(0), Some(0), Some(0)], vec![Some(0)]),
                Spec::new([num_items], log_probs.dtype()),
            ),
            false => (Op::Whole { num_outputs: 1 }, Spec::Unknown),
        };
        let inputs = (log_probs, targets, input_lengths, target_lengths);
        apply(
            Call::light("ctc_loss"),
            inputs,
            |_| (Rule::new(op), spec),
            move |(p, t, i, l), _| B::ctc_loss(p, t, i, l, blank),
        )
    }

    fn has_ctc_loss_backward() -> bool {
        B::has_ctc_loss_backward()
    }

    fn ctc_loss_backward(
        log_probs: FloatTensor<Self>,
        targets: IntTensor<Self>,
        input_lengths: IntTensor<Self>,
        target_lengths: IntTensor<Self>,
        grad_loss: FloatTensor<Self>,
        blank: usize,
    ) -> FloatTensor<Self> {
        let spec = Spec::new(log_probs.shape(), log_probs.dtype());
        let per_item = [targets.shape(), input_lengths.shape(), target_lengths.shape(), grad_loss.shape()];
        let op = match is_per_item(&log_probs, &per_item) {
            true => rows(vec![Some(1), Some(0), Some(0), Some(0), Some(0)], vec![Some(1)]),
            false => Op::Whole { num_outputs: 1 },
        };
        let inputs = (log_probs, targets, input_lengths, target_lengths, grad_loss);
        apply(
            Call::light("ctc_loss_backward"),
            inputs,
            |_| (Rule::new(op), spec),
            move |(p, t, i, l, g), _| B::ctc_loss_backward(p, t, i, l, g, blank),
        )
    }

    fn rfft(signal: FloatTensor<Self>, dim: usize, n: Option<usize>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let size = n.unwrap_or_else(|| length(&signal.shape(), dim));
        let spec = Spec::inferred(with_length(signal.shape(), dim, size / 2 + 1), signal.dtype());
        apply(
            Call::light("rfft"),
            (signal,),
            |_| (Rule::new(Op::Aligned { blocked: vec![dim], num_outputs: 2 }), (spec.clone(), spec)),
            move |(x,), _| B::rfft(x, dim, n),
        )
    }

    fn irfft(
        spectrum_re: FloatTensor<Self>,
        spectrum_im: FloatTensor<Self>,
        dim: usize,
        n: Option<usize>,
    ) -> FloatTensor<Self> {
        let size = n.unwrap_or_else(|| 2 * length(&spectrum_re.shape(), dim).saturating_sub(1));
        let spec = Spec::inferred(with_length(spectrum_re.shape(), dim, size), spectrum_re.dtype());
        apply(
            Call::light("irfft"),
            (spectrum_re, spectrum_im),
            |_| (Rule::new(aligned(vec![dim])), spec),
            move |(re, im), _| B::irfft(re, im, dim, n),
        )
    }
}

/// Whether the shapes have one row per item of `[time, items, classes]`.
fn is_per_item<B: Member>(log_probs: &ReplicaTensor<B, Float>, shapes: &[Shape]) -> bool {
    let shape = log_probs.shape();
    shapes.iter().all(|other| other.first() == shape.get(1))
}

fn bias_fits<B: Member>(bias: &Option<ReplicaTensor<B, Float>>, num_outputs: usize) -> bool {
    bias.as_ref().is_none_or(|bias| bias.shape().num_elements() == num_outputs)
}

/// Length of the last dim.
fn last<B: Member>(tensor: &ReplicaTensor<B, Float>) -> usize {
    tensor.shape().last().copied().unwrap_or(0)
}

/// Dims of `[.., features]` that hold rows.
fn rows_of(shape: &Shape) -> Vec<usize> {
    (0..shape.num_dims().saturating_sub(1)).collect()
}
