//! `ModuleOps`.

use burn::tensor::{
    DType,
    backend::Backend,
    ops::{
        AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode,
        InterpolateOptions, UnfoldOptions,
    },
};

use super::{
    case::{Any, Case, Expected, F32, FLOATS, Input, Of, Spec, Values, Values::*, WIDE, indices, main, mask},
    rules::*,
};

/// Digits that sums of some dozens of products lose when they are made in another order.
const SUMS: f64 = 32.0;

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list = Vec::new();
    rows(&mut list);
    convolutions(&mut list);
    transposed_convolutions(&mut list);
    deformable_convolution(&mut list);
    pooling(&mut list);
    attends(&mut list);
    sequences_and_spectra(&mut list);
    list
}

fn float<const D: usize>(shape: [usize; D]) -> Input {
    main(shape, Mixed)
}

fn rows<B: Backend>(list: &mut Vec<Case<B>>) {
    let spec = |rule, inputs: [Input; 2]| Spec::new(rule, FLOATS, inputs).within(SUMS);
    cases! { list, spec(BATCH, [float([7, 4]), indices([5, 3], 7)]), |i| Float (i.float(), i.int()): embedding }
    let backward = Spec::new(GRADIENT, FLOATS, [float([7, 4]), float([5, 3, 4]), indices([5, 3], 7)]).within(SUMS);
    cases! { list, backward.clone(), |i| Float (i.float(), i.float(), i.int()): embedding_backward }

    let linear = Spec::new(BATCH, FLOATS, [float([5, 3, 4]), float([4, 6]), float([6])])
        .or([float([5, 4]), float([4, 6]), float([6])])
        .within(SUMS);
    cases! { list, linear.clone(), |i| Float (i.float(), i.float(), Some(i.float())): linear }
    cases! { list, spec(BATCH, [float([5, 4]), float([4, 6])]).note("no bias"), |i| Float (i.float(), i.float(), None):
        linear
    }
    cases! { list, spec(BATCH, [float([4, 6]), float([5, 3, 6])]), |i| Float (i.float(), i.float()): linear_x_backward }
    cases! { list, spec(GRADIENT, [float([5, 3, 4]), float([5, 3, 6])]), |i| Float (i.float(), i.float()):
        linear_weight_backward
    }
    let bias = Spec::new(GRADIENT, FLOATS, [float([5, 3, 6])]).within(SUMS);
    cases! { list, bias.clone(), |i| Float (i.float()): linear_bias_backward }
    let norm = Spec::new(BATCH, FLOATS, [float([5, 3, 4]), float([4]), float([4])]).within(SUMS);
    cases! { list, norm.clone(), |i| Float (i.float(), i.float(), Some(i.float()), 1e-5): layer_norm }
}

/// Of one number of dims: the inputs `[x, weight, bias, output_grad]`, and options.
macro_rules! convolution {
    ($list:ident, $dtypes:expr, $options:expr, [$x:expr, $weight:expr, $bias:expr, $grad:expr],
     $forward:ident $x_backward:ident $weight_backward:ident $bias_backward:ident) => {
        let spec = |rule, inputs: [Input; 3]| Spec::new(rule, $dtypes, inputs).within(SUMS);
        let options = $options;
        cases! { $list, spec(BATCH, [$x, $weight, $bias]),
            |i| Float (i.float(), i.float(), Some(i.float()), options.clone()): $forward
        }
        let options = $options;
        cases! { $list, Spec::new(BATCH, $dtypes, [$x, $weight]).within(SUMS).note("no bias"),
            |i| Float (i.float(), i.float(), None, options.clone()): $forward
        }
        let options = $options;
        cases! { $list, spec(BATCH, [$x, $weight, $grad]), |i| Float (i.float(), i.float(), i.float(), options.clone()):
            $x_backward
        }
        let options = $options;
        cases! { $list, spec(GRADIENT, [$x, $weight, $grad]),
            |i| Float (i.float(), i.float(), i.float(), options.clone()): $weight_backward
        }
        cases! { $list, spec(GRADIENT, [$x, $bias, $grad]), |i| Float (i.float(), i.float(), i.float()):
            $bias_backward
        }
    };
}

fn convolutions<B: Backend>(list: &mut Vec<Case<B>>) {
    convolution! { list, FLOATS, ConvOptions::new([2], [1], [1], 2),
        [float([5, 4, 7]), float([6, 2, 3]), float([6]), float([5, 6, 4])],
        conv1d conv1d_x_backward conv1d_weight_backward conv1d_bias_backward
    }
    convolution! { list, FLOATS, ConvOptions::new([2, 1], [1, 0], [1, 2], 2),
        [float([5, 4, 6, 5]), float([6, 2, 3, 2]), float([6]), float([5, 6, 3, 3])],
        conv2d conv2d_x_backward conv2d_weight_backward conv2d_bias_backward
    }
    convolution! { list, WIDE, ConvOptions::new([1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
        [float([3, 2, 4, 3, 3]), float([4, 2, 2, 2, 2]), float([4]), float([3, 4, 3, 2, 2])],
        conv3d conv3d_x_backward conv3d_weight_backward conv3d_bias_backward
    }
}

/// As [`convolution`]; the gradient of `x` is computed without `x`.
macro_rules! transposed_convolution {
    ($list:ident, $dtypes:expr, $options:expr, [$x:expr, $weight:expr, $bias:expr, $grad:expr],
     $forward:ident $x_backward:ident $weight_backward:ident $bias_backward:ident) => {
        let spec = |rule, inputs: [Input; 3]| Spec::new(rule, $dtypes, inputs).within(SUMS);
        let options = $options;
        cases! { $list, spec(BATCH, [$x, $weight, $bias]),
            |i| Float (i.float(), i.float(), Some(i.float()), options.clone()): $forward
        }
        let options = $options;
        cases! { $list, Spec::new(BATCH, $dtypes, [$weight, $grad]).within(SUMS),
            |i| Float (i.float(), i.float(), options.clone()): $x_backward
        }
        let options = $options;
        cases! { $list, spec(GRADIENT, [$x, $weight, $grad]),
            |i| Float (i.float(), i.float(), i.float(), options.clone()): $weight_backward
        }
        cases! { $list, spec(GRADIENT, [$x, $bias, $grad]), |i| Float (i.float(), i.float(), i.float()):
            $bias_backward
        }
    };
}

fn transposed_convolutions<B: Backend>(list: &mut Vec<Case<B>>) {
    transposed_convolution! { list, FLOATS, ConvTransposeOptions::new([2], [1], [1], [1], 2),
        [float([5, 4, 4]), float([4, 3, 3]), float([6]), float([5, 6, 8])],
        conv_transpose1d conv_transpose1d_x_backward conv_transpose1d_weight_backward conv_transpose1d_bias_backward
    }
    transposed_convolution! { list, FLOATS, ConvTransposeOptions::new([2, 1], [0, 1], [1, 0], [1, 1], 2),
        [float([5, 4, 3, 4]), float([4, 3, 2, 3]), float([6]), float([5, 6, 7, 4])],
        conv_transpose2d conv_transpose2d_x_backward conv_transpose2d_weight_backward conv_transpose2d_bias_backward
    }
    transposed_convolution! { list, WIDE, ConvTransposeOptions::new([1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], 1),
        [float([3, 2, 2, 3, 2]), float([2, 3, 2, 2, 2]), float([3]), float([3, 3, 3, 4, 3])],
        conv_transpose3d conv_transpose3d_x_backward conv_transpose3d_weight_backward conv_transpose3d_bias_backward
    }
}

fn deformable_convolution<B: Backend>(list: &mut Vec<Case<B>>) {
    let options = || DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
    let inputs = || {
        let [x, offset, weight] = [float([3, 2, 5, 4]), main([3, 12, 3, 3], Unit), float([4, 2, 3, 2])];
        [x, offset, weight, main([3, 6, 3, 3], Unit), float([4])]
    };
    let [x, offset, weight, masked, bias] = inputs();
    let backward = [x.clone(), offset.clone(), weight.clone(), masked, bias, float([3, 4, 3, 3])];
    cases! { list, Spec::new(BATCH, WIDE, inputs()).within(SUMS).note("mask and bias"),
        |i| Float (i.float(), i.float(), i.float(), Some(i.float()), Some(i.float()), options()): deform_conv2d
    }
    cases! { list, Spec::new(BATCH, WIDE, [x, offset, weight]).within(SUMS),
        |i| Float (i.float(), i.float(), i.float(), None, None, options()): deform_conv2d
    }
    // In f64, too, Flex computes it in f32.
    let spec = Spec::new(GRADIENT, F32, backward).within(SUMS);
    cases! { list, spec.clone(), deform_conv2d_backward: |i| {
        let grads = B::deform_conv2d_backward(
            i.float(), i.float(), i.float(), Some(i.float()), Some(i.float()), i.float(), options(),
        );
        let always = [grads.x_grad, grads.offset_grad, grads.weight_grad];
        always.into_iter().chain(grads.mask_grad).chain(grads.bias_grad).map(Any::Float).collect()
    } }
}

fn pooling<B: Backend>(list: &mut Vec<Case<B>>) {
    let line = || Spec::new(BATCH, FLOATS, [float([5, 3, 9])]).within(SUMS).note("3 by steps of 2");
    let plane = || Spec::new(BATCH, FLOATS, [float([5, 3, 6, 5])]).within(SUMS).note("3 x 2 by steps of 2 and 1");
    let [kernel, stride, padding] = [[3, 2], [2, 1], [1, 0]];
    cases! { list, line(), |i| Float (i.float(), 3, 2, 1, true, false): avg_pool1d }
    cases! { list, line(), |i| Float (i.float(), 3, 2, 1, 1, false): max_pool1d }
    cases! { list, plane(), |i| Float (i.float(), kernel, stride, padding, false, false): avg_pool2d }
    cases! { list, plane(), |i| Float (i.float(), kernel, stride, padding, [1, 1], true): max_pool2d }
    cases! { list, line().note("to 4"), |i| Float (i.float(), 4): adaptive_avg_pool1d }
    cases! { list, plane().note("to 3 x 2"), |i| Float (i.float(), [3, 2]): adaptive_avg_pool2d }
    cases! { list, line(), max_pool1d_with_indices: |i| {
        let pooled = B::max_pool1d_with_indices(i.float(), 3, 2, 1, 1, false);
        vec![Any::Float(pooled.output), Any::Int(pooled.indices)]
    } }
    cases! { list, plane(), max_pool2d_with_indices: |i| {
        let pooled = B::max_pool2d_with_indices(i.float(), kernel, stride, padding, [1, 1], false);
        vec![Any::Float(pooled.output), Any::Int(pooled.indices)]
    } }

    let back = |x: Input, grad: Input| Spec::new(BATCH, FLOATS, [x, grad]).within(SUMS);
    cases! { list, back(float([5, 3, 9]), float([5, 3, 5])), |i| Float (i.float(), i.float(), 3, 2, 1, true, false):
        avg_pool1d_backward
    }
    cases! { list, back(float([5, 3, 6, 5]), float([5, 3, 3, 4])),
        |i| Float (i.float(), i.float(), kernel, stride, padding, false, false): avg_pool2d_backward
    }
    cases! { list, back(float([5, 3, 9]), float([5, 3, 4])), |i| Float (i.float(), i.float()):
        adaptive_avg_pool1d_backward
    }
    cases! { list, back(float([5, 3, 6, 5]), float([5, 3, 3, 2])), |i| Float (i.float(), i.float()):
        adaptive_avg_pool2d_backward
    }
    let unpooled = |x: Input, grad: Input, chosen| Spec::new(BATCH, FLOATS, [x, grad, chosen]).within(SUMS);
    cases! { list, unpooled(float([5, 3, 9]), float([5, 3, 5]), indices([5, 3, 5], 9)),
        max_pool1d_with_indices_backward: |i| {
        let (x, grad, chosen) = (i.float(), i.float(), i.int());
        vec![Any::Float(B::max_pool1d_with_indices_backward(x, 3, 2, 1, 1, false, grad, chosen).x_grad)]
    } }
    cases! { list, unpooled(float([5, 3, 6, 5]), float([5, 3, 3, 4]), indices([5, 3, 3, 4], 30)),
        max_pool2d_with_indices_backward: |i| {
        let (x, grad, chosen) = (i.float(), i.float(), i.int());
        vec![Any::Float(
            B::max_pool2d_with_indices_backward(x, kernel, stride, padding, [1, 1], false, grad, chosen).x_grad,
        )]
    } }

    let mode = InterpolateOptions::new;
    let sized = || Spec::new(BATCH, FLOATS, [float([5, 3, 4, 3])]).within(SUMS);
    cases! { list, sized().note("bilinear to 6 x 5"), |i| Float (i.float(), [6, 5], mode(InterpolateMode::Bilinear)):
        interpolate
    }
    cases! { list, sized().note("nearest to 2 x 5"), |i| Float (i.float(), [2, 5], mode(InterpolateMode::Nearest)):
        interpolate
    }
    cases! { list, sized().note("bicubic to 6 x 5"), |i| Float (i.float(), [6, 5], mode(InterpolateMode::Bicubic)):
        interpolate
    }
    cases! { list, sized().note("Lanczos to 6 x 2"), |i| Float (i.float(), [6, 2], mode(InterpolateMode::Lanczos3)):
        interpolate
    }
    cases! { list, back(float([5, 3, 4, 3]), float([5, 3, 6, 5])).note("bilinear"),
        |i| Float (i.float(), i.float(), [6, 5], mode(InterpolateMode::Bilinear)): interpolate_backward
    }
    let blocks = |note| Spec::new(BATCH, FLOATS, [float([3, 2, 5, 4])]).within(SUMS).note(note);
    cases! { list, blocks("2 x 3"), |i| Float (i.float(), [2, 3], UnfoldOptions::new([1, 1], [0, 0], [1, 1])):
        unfold4d
    }
    cases! { list, blocks("2 x 3, padded"), |i| Float (i.float(), [2, 3], UnfoldOptions::new([2, 1], [1, 0], [1, 1])):
        unfold4d
    }
}

fn attends<B: Backend>(list: &mut Vec<Case<B>>) {
    let inputs = || [float([3, 2, 5, 4]), float([3, 2, 6, 4]), float([3, 2, 6, 3])];
    let plain = Spec::new(BATCH, WIDE, inputs()).within(SUMS).note("causal");
    let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
    cases! { list, plain.clone(), |i| Float (i.float(), i.float(), i.float(), None, None, causal): attention }
    let masked = |rows, added| {
        let [query, key, value] = inputs();
        Spec::new(BATCH, WIDE, [query, key, value, rows, added]).within(SUMS)
    };
    cases! { list, masked(mask([3, 2, 5, 6]), float([3, 2, 5, 6])).note("mask and bias"),
        |i| Float (i.float(), i.float(), i.float(), Some(i.bool()), Some(i.float()),
        AttentionModuleOptions::default()): attention
    }
    cases! { list, masked(mask([3, 1, 5, 6]), float([1, 2, 5, 6])).note("mask and bias that broadcast"),
        |i| Float (i.float(), i.float(), i.float(), Some(i.bool()), Some(i.float()),
        AttentionModuleOptions::default()): attention
    }
}

fn sequences_and_spectra<B: Backend>(list: &mut Vec<Case<B>>) {
    let listed = |values: &'static [i64], shape: &[usize]| Input {
        dtype: Of::Always(DType::I64),
        shape: shape.to_vec(),
        values: Values::Listed(values),
    };
    let lengths = || [listed(&[1, 2, 3, 1, 2, 2], &[3, 2]), listed(&[6, 5, 6], &[3]), listed(&[2, 1, 2], &[3])];
    let [targets, input_lengths, target_lengths] = lengths();
    let ctc = Spec::new(BATCH, F32, [main([6, 3, 4], Negative), targets, input_lengths, target_lengths]).within(64.0);
    cases! { list, ctc.clone(), |i| Float (i.float(), i.int(), i.int(), i.int(), 0): ctc_loss }
    cases! { list, Spec::new(ANSWER, F32, []), has_ctc_loss_backward: |_i| {
        vec![Any::answer(B::has_ctc_loss_backward())]
    } }
    let [targets, input_lengths, target_lengths] = lengths();
    let inputs = [main([6, 3, 4], Negative), targets, input_lengths, target_lengths, float([3])];
    let absent = Spec::new(BATCH, F32, inputs).expect(Expected::Panic).note("not in Flex");
    cases! { list, absent.clone(), |i| Float (i.float(), i.int(), i.int(), i.int(), i.float(), 0): ctc_loss_backward }
    let signal = |note| Spec::new(ALONG, WIDE, [float([5, 8])]).within(SUMS).note(note);
    cases! { list, signal("dim 1"), |i| (Float, Float) (i.float(), 1, None): rfft }
    cases! { list, signal("dim 0, 4 of 5"), |i| (Float, Float) (i.float(), 0, Some(4)): rfft }
    let spectrum = Spec::new(ALONG, WIDE, [float([3, 5]), float([3, 5])]).within(SUMS).note("dim 1");
    cases! { list, spectrum.clone(), |i| Float (i.float(), i.float(), 1, None): irfft }
}
