//! `FloatTensorOps`.

use burn::tensor::{
    DType, Distribution, IndexingUpdateOp, IntDType, Scalar, Shape, Slice, TensorData,
    backend::Backend,
    ops::{GridSampleOptions, GridSamplePaddingMode, InterpolateMode},
};
use burn_backend::{BoolDType, FloatDType, TensorMetadata, read_sync};

use super::{
    case::{Any, Case, Expected, F32, FLOATS, Input, Of, Spec, Values::*, WIDE, indices, main, mask},
    rules::*,
    tables::{binary, broadcast_mask, one, reductions},
};

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list = Vec::new();
    makes_and_reads(&mut list);
    elementwise(&mut list);
    moves(&mut list);
    reduces(&mut list);
    list
}

fn makes_and_reads<B: Backend>(list: &mut Vec<Case<B>>) {
    let shape = || Shape::from([5, 3]);
    let none = |dtypes| Spec::new(NO_INPUT, dtypes, []);
    let value = |rule| Spec::new(rule, FLOATS, [main([5, 3], Mixed)]).or([main([7], Mixed)]).or([main([0, 2], Mixed)]);
    cases! { list, none(FLOATS), |i| Float (shape(), &i.device, i.float_dtype()): float_zeros float_ones }
    cases! { list, none(FLOATS), |i| Float (shape(), Scalar::Float(2.5), &i.device, i.float_dtype()): float_full }
    cases! { list, none(FLOATS).note("of any values"), float_empty: |i| {
        let tensor = B::float_empty(shape(), &i.device, i.float_dtype());
        vec![Any::described(tensor.shape(), tensor.dtype())]
    } }
    cases! { list, none(FLOATS).expect(Expected::Drawn), float_random: |i| {
        B::seed(&i.device, 5);
        let mut draw = |distribution| Any::Float(B::float_random(shape(), distribution, &i.device, i.float_dtype()));
        let others = [Distribution::Bernoulli(0.5), Distribution::Uniform(-2.0, 2.0)];
        [Distribution::Default, Distribution::Normal(1.0, 2.0)].into_iter().chain(others).map(&mut draw).collect()
    } }
    cases! { list, value(READ), float_into_data: |i| vec![Any::read(read_sync(B::float_into_data(i.float())))] }
    cases! { list, value(NO_INPUT), float_from_data: |i| {
        let data: TensorData = read_sync(B::float_into_data(i.float())).unwrap();
        vec![Any::Float(B::float_from_data(data, &i.device))]
    } }
    cases! { list, value(ANSWER), float_device: |i| vec![Any::answer(B::float_device(&i.float()) == i.device)] }
    cases! { list, value(READ).note("to another device"), float_to_device: |i| {
        let elsewhere = i.elsewhere.clone();
        vec![Any::Float(B::float_to_device(i.float(), &elsewhere))]
    } }
    cases! { list, value(HANDLE).note("to its own device"), float_to_device: |i| {
        let device = i.device.clone();
        vec![Any::Float(B::float_to_device(i.float(), &device))]
    } }
    cases! { list, value(HANDLE), |i| Float (i.float()): float_detach }
    cases! { list, value(HANDLE), |i| Float (i.float(), true): float_set_require_grad }
    cases! { list, value(ANSWER), float_is_require_grad: |i| vec![Any::answer(B::float_is_require_grad(&i.float()))] }
}

fn elementwise<B: Backend>(list: &mut Vec<Case<B>>) {
    let each = |values| one(ELEMENTWISE, FLOATS, values);
    let close = |values| each(values).within(8.0);
    cases! { list, one(SUM, FLOATS, Mixed), |i| Float (i.float()): float_neg }
    cases! { list, each(Mixed), |i| Float (i.float()):
        float_abs float_sign float_round float_floor float_ceil float_trunc float_recip
    }
    // Vector units and the rest of a row compute them apart, to the last digits.
    cases! { list, close(Mixed), |i| Float (i.float()):
        float_exp float_cos float_sin float_tanh float_sinh float_cosh float_erf float_atan float_asinh
    }
    cases! { list, close(Unit), |i| Float (i.float()): float_tan float_acos float_asin float_atanh }
    cases! { list, close(Positive), |i| Float (i.float()): float_log float_log1p float_sqrt }
    cases! { list, close(AtLeastOne), |i| Float (i.float()): float_acosh }

    let scalar = Scalar::Float;
    cases! { list, each(Mixed).note("0.75"), |i| Float (i.float(), scalar(0.75)):
        float_add_scalar float_sub_scalar float_remainder_scalar float_clamp_min float_clamp_max
    }
    cases! { list, one(SUM, FLOATS, Mixed).within(2.0).note("0.75"), |i| Float (i.float(), scalar(0.75)):
        float_mul_scalar float_div_scalar
    }
    cases! { list, each(Mixed).note("-1 to 0.5"), |i| Float (i.float(), scalar(-1.0), scalar(0.5)): float_clamp }
    cases! { list, close(Mixed).note("3"), |i| Float (i.float(), Scalar::Int(3)):
        float_powi_scalar float_powi_scalar_impl
    }
    cases! { list, close(Positive).note("1.5"), |i| Float (i.float(), scalar(1.5)):
        float_powf_scalar float_powf_scalar_impl
    }

    let pair = |left, right| binary(ELEMENTWISE, FLOATS, left, right);
    cases! { list, binary(SUM, FLOATS, Mixed, Mixed), |i| Float (i.float(), i.float()): float_add float_sub }
    cases! { list, pair(Mixed, Mixed), |i| Float (i.float(), i.float()): float_mul float_div float_remainder }
    cases! { list, pair(Positive, Small).within(16.0), |i| Float (i.float(), i.float()): float_powf }
    cases! { list, pair(Mixed, Mixed).within(8.0), |i| Float (i.float(), i.float()): float_atan2 }
    let exponents = Input { dtype: Of::Always(DType::I64), ..main([5, 3], Below(4)) };
    let powi = Spec::new(ELEMENTWISE, FLOATS, [main([5, 3], Mixed), exponents]).within(8.0);
    cases! { list, powi.clone(), |i| Float (i.float(), i.int()): float_powi }

    cases! { list, pair(Ties, Ties), |i| Bool (i.float(), i.float(), BoolDType::Native):
        float_equal float_not_equal float_greater float_greater_equal float_lower float_lower_equal
    }
    cases! { list, each(Ties).note("1"), |i| Bool (i.float(), scalar(1.0), BoolDType::U8):
        float_equal_elem float_not_equal_elem float_greater_elem float_greater_equal_elem float_lower_elem
        float_lower_equal_elem
    }
    cases! { list, each(Special), |i| Bool (i.float(), BoolDType::Native): float_is_nan float_is_inf }
    cases! { list, one(ELEMENTWISE, FLOATS, Mixed).note("to i32"), |i| Int (i.float(), IntDType::I32): float_into_int }
    cases! { list, each(Mixed).note("to f64"), |i| Float (i.float(), FloatDType::F64): float_cast }
    cases! { list, each(Mixed).note("to f16"), |i| Float (i.float(), FloatDType::F16): float_cast }
    cases! { list, broadcast_mask(FLOATS), |i| Float (i.float(), i.bool(), i.float()): float_mask_where }
    let filled = Spec::new(ELEMENTWISE, FLOATS, [main([5, 3], Mixed), mask([5, 3])])
        .or([main([5, 3], Mixed), mask([1, 3])])
        .note("7");
    cases! { list, filled.clone(), |i| Float (i.float(), i.bool(), scalar(7.0)): float_mask_fill }
    let cross = Spec::new(ALONG, WIDE, [main([5, 3], Mixed), main([5, 3], Mixed)]).note("dim 1").within(4.0);
    cases! { list, cross.clone(), |i| Float (i.float(), i.float(), 1): float_cross }
}

fn moves<B: Backend>(list: &mut Vec<Case<B>>) {
    let view = |note| Spec::new(VIEW, FLOATS, [main([5, 3, 4], Mixed)]).note(note);
    cases! { list, view("").or([main([5, 3], Mixed)]), |i| Float (i.float()): float_transpose }
    cases! { list, view("0 and 2"), |i| Float (i.float(), 0, 2): float_swap_dims }
    cases! { list, view("[2, 0, 1]"), |i| Float (i.float(), &[2, 0, 1]): float_permute }
    cases! { list, view("dims 0 and 2"), |i| Float (i.float(), &[0, 2]): float_flip }
    cases! { list, view("all dims"), |i| Float (i.float(), &[0, 1, 2]): float_flip }
    cases! { list, view("to [15, 4]"), |i| Float (i.float(), Shape::from([15, 4])): float_reshape }
    cases! { list, view("to [3, 20]"), |i| Float (i.float(), Shape::from([3, 20])): float_reshape }
    cases! { list, view("to [5, 12]"), |i| Float (i.float(), Shape::from([5, 12])): float_reshape }
    let expanded = Spec::new(VIEW, FLOATS, [main([5, 1], Mixed)]).or([main([1, 3], Mixed)]).note("to [2, 5, 3]");
    cases! { list, expanded.clone(), |i| Float (i.float(), Shape::from([2, 5, 3])): float_expand }
    cases! { list, view("dim 1, twice"), |i| Float (i.float(), 1, 2): float_repeat_dim }
    cases! { list, view("dim 0, 3 times"), |i| Float (i.float(), 0, 3): float_repeat_dim }
    cases! { list, view("dim 0, 2 by steps of 2"), |i| Float (i.float(), 0, 2, 2): float_unfold }
    cases! { list, view("dim 2, 3 by steps of 1"), |i| Float (i.float(), 2, 3, 1): float_unfold }
    let slices = |dim: usize, slice: Slice| {
        let mut slices = vec![Slice::from(0..5), Slice::from(0..3), Slice::from(0..4)];
        slices[dim] = slice;
        slices
    };
    cases! { list, view("1..4 of dim 0"), |i| Float (i.float(), &slices(0, Slice::from(1..4))): float_slice }
    cases! { list, view("0..4 by steps of -2 of dim 2"), |i| Float (i.float(), &slices(2, Slice::new(0, Some(4), -2))):
        float_slice
    }
    cases! { list, view("0..5 by steps of 2 of dim 0"), |i| Float (i.float(), &slices(0, Slice::new(0, Some(5), 2))):
        float_slice
    }
    cases! { list, view("1..5 by steps of -1 of dim 0"), |i| Float (i.float(), &slices(0, Slice::new(1, Some(5), -1))):
        float_slice
    }
    cases! { list, view("row 3"), |i| Float (i.float(), &[Slice::from(3..4)]): float_slice }
    cases! { list, view("1..4 of dim 0 and 0..3 by steps of 2 of dim 1"),
        |i| Float (i.float(), &[Slice::from(1..4), Slice::new(0, Some(3), 2)]): float_slice
    }
    let assigned = |value| Spec::new(VIEW, FLOATS, [main([5, 3, 4], Mixed), value]);
    cases! { list, assigned(main([3, 3, 4], Mixed)).note("1..4 of dim 0"),
        |i| Float (i.float(), &slices(0, Slice::from(1..4)), i.float()): float_slice_assign
    }
    cases! { list, assigned(main([5, 3, 2], Mixed)).note("1..3 of dim 2"),
        |i| Float (i.float(), &slices(2, Slice::from(1..3)), i.float()): float_slice_assign
    }
    cases! { list, assigned(main([2, 3, 4], Mixed)).note("1..5 by steps of 2 of dim 0"),
        |i| Float (i.float(), &slices(0, Slice::new(1, Some(5), 2)), i.float()): float_slice_assign
    }
    cases! { list, assigned(main([5, 3, 4], Mixed)).note("all of it, dim 0 backwards"),
        |i| Float (i.float(), &slices(0, Slice::new(0, Some(5), -1)), i.float()): float_slice_assign
    }
    cases! { list, assigned(main([1, 3, 4], Mixed)).note("row 3"),
        |i| Float (i.float(), &[Slice::from(3..4)], i.float()): float_slice_assign
    }
    cases! { list, assigned(main([3, 2, 4], Mixed)).note("1..4 of dim 0 and 0..3 by steps of 2 of dim 1"),
        |i| Float (i.float(), &[Slice::from(1..4), Slice::new(0, Some(3), 2)], i.float()): float_slice_assign
    }
    let joined = |first, second| Spec::new(VIEW, FLOATS, [first, second, main([5, 3], Mixed)]);
    cases! { list, joined(main([2, 3], Mixed), main([1, 3], Mixed)).note("dim 0"),
        |i| Float (vec![i.float(), i.float(), i.float()], 0): float_cat
    }
    cases! { list, joined(main([5, 2], Mixed), main([5, 1], Mixed)).note("dim 1"),
        |i| Float (vec![i.float(), i.float(), i.float()], 1): float_cat
    }
    indexes(list);
}

fn indexes<B: Backend>(list: &mut Vec<Case<B>>) {
    let picked = |rows, note| Spec::new(INDEXED, FLOATS, [main([5, 3], Mixed), rows]).note(note);
    cases! { list, picked(indices([4, 3], 5), "dim 0"), |i| Float (0, i.float(), i.int()): float_gather }
    cases! { list, picked(indices([5, 2], 3), "dim 1"), |i| Float (1, i.float(), i.int()): float_gather }
    cases! { list, picked(indices([7], 5), "dim 0"), |i| Float (i.float(), 0, i.int()): float_select }
    cases! { list, picked(indices([4], 3), "dim 1"), |i| Float (i.float(), 1, i.int()): float_select }
    let added = |rows, values, note| Spec::new(INDEXED, FLOATS, [main([5, 3], Mixed), rows, values]).note(note);
    cases! { list, added(indices([4, 3], 5), main([4, 3], Mixed), "dim 0"),
        |i| Float (0, i.float(), i.int(), i.float()): float_scatter_add
    }
    cases! { list, added(indices([5, 2], 3), main([5, 2], Mixed), "dim 1"),
        |i| Float (1, i.float(), i.int(), i.float()): float_scatter_add
    }
    cases! { list, added(indices([7], 5), main([7, 3], Mixed), "dim 0"), |i| Float (i.float(), 0, i.int(), i.float()):
        float_select_add
    }
    cases! { list, added(indices([4], 3), main([5, 4], Mixed), "dim 1"), |i| Float (i.float(), 1, i.int(), i.float()):
        float_select_add
    }
    let nd = |update| {
        Spec::new(INDEXED, WIDE, [main([5, 3], Mixed), indices([4, 1], 5), main([4, 3], Mixed)])
            .or([main([5, 3], Mixed), indices([4, 2], 3), main([4], Mixed)])
            .or([main([5, 3, 2], Mixed), indices([2, 3, 1], 5), main([2, 3, 3, 2], Mixed)])
            .or([main([5, 3, 2], Mixed), indices([7, 2], 3), main([7, 2], Mixed)])
            .note(update)
    };
    cases! { list, nd("add"), |i| Float (i.float(), i.int(), i.float(), IndexingUpdateOp::Add): float_scatter_nd }
    cases! { list, nd("max"), |i| Float (i.float(), i.int(), i.float(), IndexingUpdateOp::Max): float_scatter_nd }
    let picked_nd = Spec::new(INDEXED, WIDE, [main([5, 3], Mixed), indices([4, 1], 5)])
        .or([main([5, 3], Mixed), indices([4, 2], 3)])
        .or([main([5, 3, 2], Mixed), indices([2, 3, 1], 5)])
        .or([main([5, 3, 2], Mixed), indices([2], 3)]);
    cases! { list, picked_nd.clone(), |i| Float (i.float(), i.int()): float_gather_nd }
    let sampled = Spec::new(BATCH, F32, [main([3, 2, 5, 4], Mixed), main([3, 4, 3, 2], Unit)]).within(16.0);
    cases! { list, sampled.clone(), |i| Float (
        i.float(),
        i.float(),
        GridSampleOptions::new(InterpolateMode::Bilinear).with_padding_mode(GridSamplePaddingMode::Border)
    ): float_grid_sample_2d }
}

fn reduces<B: Backend>(list: &mut Vec<Case<B>>) {
    let matmul = Spec::new(MATMUL, FLOATS, [main([5, 4], Mixed), main([4, 3], Mixed)])
        .or([main([2, 5, 4], Mixed), main([2, 4, 3], Mixed)])
        .or([main([2, 3, 5, 4], Mixed), main([1, 3, 4, 1], Mixed)])
        .or([main([1, 1], Mixed), main([1, 7], Mixed)])
        .within(16.0);
    cases! { list, matmul.clone(), |i| Float (i.float(), i.float()): float_matmul }

    let all = |rule, values| reductions(rule, FLOATS, values);
    let along = |rule, values, note| reductions(rule, FLOATS, values).note(note);
    cases! { list, all(ADDS_UP, Mixed).within(16.0), |i| Float (i.float()): float_sum float_mean }
    cases! { list, all(ADDS_UP, Mixed), |i| Float (i.float()): float_max float_min float_max_abs }
    cases! { list, all(TAKES_ALL, Small), |i| Float (i.float()): float_prod }
    cases! { list, along(ADDS_UP, Mixed, "dim 0").within(16.0), |i| Float (i.float(), 0): float_sum_dim float_mean_dim }
    cases! { list, along(ADDS_UP, Mixed, "dim 1").within(16.0), |i| Float (i.float(), 1): float_sum_dim float_mean_dim }
    cases! { list, along(ADDS_UP, Ties, "dim 0"), |i| Float (i.float(), 0):
        float_max_dim float_min_dim float_max_abs_dim
    }
    cases! { list, along(TAKES_ALL, Small, "dim 0"), |i| Float (i.float(), 0): float_prod_dim }
    cases! { list, along(ALONG, Ties, "dim 0"), |i| Float (i.float(), 0): float_cummin float_cummax }
    cases! { list, along(ALONG, Small, "dim 0").within(8.0), |i| Float (i.float(), 0): float_cumsum float_cumprod }
    cases! { list, along(ALONG, Small, "dim 1").within(8.0), |i| Float (i.float(), 1): float_cumsum }

    let dtype = IntDType::I32;
    cases! { list, along(TAKES_ALL, Ties, "dim 0"), |i| Int (i.float(), 0, dtype): float_argmax float_argmin }
    cases! { list, along(TAKES_ALL, Ties, "dim 1"), |i| Int (i.float(), 1, dtype): float_argmax float_argmin }
    cases! { list, along(TAKES_ALL, Ties, "dim 0"), |i| (Float, Int) (i.float(), 0, dtype):
        float_max_dim_with_indices float_min_dim_with_indices
    }
    cases! { list, along(ALONG, Distinct, "dim 0, 2 of 5"), |i| Float (i.float(), 0, 2): float_topk }
    let absent = |note| Spec::new(ALONG, F32, [main([5, 3], Distinct)]).note(note).expect(Expected::Panic);
    cases! { list, absent("not in Flex"), |i| Int (i.float(), 0, 2, dtype): float_argtopk }
    cases! { list, along(ALONG, Distinct, "dim 0"), |i| Float (i.float(), 0, true): float_sort }
    cases! { list, along(ALONG, Distinct, "dim 1"), |i| Float (i.float(), 1, false): float_sort }
    cases! { list, along(ALONG, Distinct, "dim 0"), |i| Int (i.float(), 0, false, dtype): float_argsort }
    cases! { list, along(ALONG, Distinct, "dim 0"), |i| (Float, Int) (i.float(), 0, false, dtype):
        float_sort_with_indices
    }
    cases! { list, all(ADDS_UP, Below(2)), |i| Bool (i.float(), BoolDType::Native): float_any float_all }
    cases! { list, along(ADDS_UP, Below(2), "dim 0"), |i| Bool (i.float(), 0, BoolDType::U8):
        float_any_dim float_all_dim
    }
}
