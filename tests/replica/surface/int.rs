//! `IntTensorOps`.

use burn::tensor::{Distribution, IndexingUpdateOp, IntDType, Scalar, Shape, Slice, TensorData, backend::Backend};
use burn_backend::{BoolDType, FloatDType, TensorMetadata, read_sync};

use super::{
    case::{Any, Case, Expected, I64, INTS, SIGNED, Spec, Values::*, indices, main, mask},
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
    let none = || Spec::new(NO_INPUT, INTS, []);
    let value = |rule| Spec::new(rule, INTS, [main([5, 3], Mixed)]).or([main([7], Mixed)]).or([main([0, 2], Mixed)]);
    cases! { list, none(), |i| Int (shape(), &i.device, i.int_dtype()): int_zeros int_ones }
    cases! { list, none(), |i| Int (shape(), Scalar::Int(7), &i.device, i.int_dtype()): int_full }
    cases! { list, none(), |i| Int (2..9, &i.device, i.int_dtype()): int_arange }
    cases! { list, none(), |i| Int (2..9, 3, &i.device, i.int_dtype()): int_arange_step }
    cases! { list, none().note("of any values"), int_empty: |i| {
        let tensor = B::int_empty(shape(), &i.device, i.int_dtype());
        vec![Any::described(tensor.shape(), tensor.dtype())]
    } }
    cases! { list, none().expect(Expected::Drawn), int_random: |i| {
        B::seed(&i.device, 5);
        let mut draw = |distribution| Any::Int(B::int_random(shape(), distribution, &i.device, i.int_dtype()));
        [Distribution::Uniform(0.0, 100.0), Distribution::Bernoulli(0.5)].map(&mut draw).into()
    } }
    cases! { list, value(READ), int_into_data: |i| vec![Any::read(read_sync(B::int_into_data(i.int())))] }
    cases! { list, value(NO_INPUT), int_from_data: |i| {
        let data: TensorData = read_sync(B::int_into_data(i.int())).unwrap();
        vec![Any::Int(B::int_from_data(data, &i.device))]
    } }
    cases! { list, value(ANSWER), int_device: |i| vec![Any::answer(B::int_device(&i.int()) == i.device)] }
    cases! { list, value(READ).note("to another device"), int_to_device: |i| {
        let elsewhere = i.elsewhere.clone();
        vec![Any::Int(B::int_to_device(i.int(), &elsewhere))]
    } }
}

fn elementwise<B: Backend>(list: &mut Vec<Case<B>>) {
    let each = |values| one(ELEMENTWISE, INTS, values);
    cases! { list, one(ELEMENTWISE, SIGNED, Mixed), |i| Int (i.int()): int_neg int_abs int_sign }
    cases! { list, each(Mixed), |i| Int (i.int()): bitwise_not }
    cases! { list, each(Mixed).note("3"), |i| Int (i.int(), Scalar::Int(3)):
        int_add_scalar int_sub_scalar int_mul_scalar int_div_scalar int_remainder_scalar int_clamp_min int_clamp_max
        bitwise_and_scalar bitwise_or_scalar bitwise_xor_scalar
    }
    cases! { list, each(Small).note("3"), |i| Int (i.int(), Scalar::Int(3)):
        int_powi_scalar int_powi_scalar_impl bitwise_left_shift_scalar bitwise_right_shift_scalar
    }
    cases! { list, each(Mixed).note("2 to 30"), |i| Int (i.int(), Scalar::Int(2), Scalar::Int(30)): int_clamp }

    let pair = |left, right| binary(ELEMENTWISE, INTS, left, right);
    cases! { list, binary(SUM, INTS, Mixed, Mixed), |i| Int (i.int(), i.int()): int_add int_sub }
    cases! { list, pair(Mixed, Positive), |i| Int (i.int(), i.int()):
        int_mul int_div int_remainder bitwise_and bitwise_or bitwise_xor
    }
    cases! { list, pair(Small, Below(4)), |i| Int (i.int(), i.int()): int_powi bitwise_left_shift bitwise_right_shift }
    cases! { list, pair(Ties, Ties), |i| Bool (i.int(), i.int(), BoolDType::Native):
        int_equal int_not_equal int_greater int_greater_equal int_lower int_lower_equal
    }
    cases! { list, each(Ties).note("1"), |i| Bool (i.int(), Scalar::Int(1), BoolDType::U8):
        int_equal_elem int_not_equal_elem int_greater_elem int_greater_equal_elem int_lower_elem int_lower_equal_elem
    }
    cases! { list, each(Mixed).note("to f32"), |i| Float (i.int(), FloatDType::F32): int_into_float }
    cases! { list, each(Mixed).note("to i16"), |i| Int (i.int(), IntDType::I16): int_cast }
    cases! { list, broadcast_mask(INTS), |i| Int (i.int(), i.bool(), i.int()): int_mask_where }
    let filled = Spec::new(ELEMENTWISE, INTS, [main([5, 3], Mixed), mask([5, 3])])
        .or([main([5, 3], Mixed), mask([1, 3])])
        .note("7");
    cases! { list, filled.clone(), |i| Int (i.int(), i.bool(), Scalar::Int(7)): int_mask_fill }
}

fn moves<B: Backend>(list: &mut Vec<Case<B>>) {
    let view = |note| Spec::new(VIEW, INTS, [main([5, 3, 4], Mixed)]).note(note);
    cases! { list, view("").or([main([5, 3], Mixed)]), |i| Int (i.int()): int_transpose }
    cases! { list, view("0 and 2"), |i| Int (i.int(), 0, 2): int_swap_dims }
    cases! { list, view("[2, 0, 1]"), |i| Int (i.int(), &[2, 0, 1]): int_permute }
    cases! { list, view("dims 0 and 2"), |i| Int (i.int(), &[0, 2]): int_flip }
    cases! { list, view("all dims"), |i| Int (i.int(), &[0, 1, 2]): int_flip }
    cases! { list, view("to [15, 4]"), |i| Int (i.int(), Shape::from([15, 4])): int_reshape }
    cases! { list, view("to [3, 20]"), |i| Int (i.int(), Shape::from([3, 20])): int_reshape }
    let expanded = Spec::new(VIEW, INTS, [main([5, 1], Mixed)]).or([main([1, 3], Mixed)]).note("to [2, 5, 3]");
    cases! { list, expanded.clone(), |i| Int (i.int(), Shape::from([2, 5, 3])): int_expand }
    cases! { list, view("dim 1, twice"), |i| Int (i.int(), 1, 2): int_repeat_dim }
    cases! { list, view("dim 0, 2 by steps of 2"), |i| Int (i.int(), 0, 2, 2): int_unfold }
    let slices = || [Slice::from(1..4), Slice::from(0..3), Slice::from(0..4)];
    cases! { list, view("1..4 of dim 0"), |i| Int (i.int(), &slices()): int_slice }
    let assigned = Spec::new(VIEW, INTS, [main([5, 3, 4], Mixed), main([3, 3, 4], Mixed)]).note("1..4 of dim 0");
    cases! { list, assigned.clone(), |i| Int (i.int(), &slices(), i.int()): int_slice_assign }
    let joined = Spec::new(VIEW, INTS, [main([2, 3], Mixed), main([5, 3], Mixed)]).note("dim 0");
    cases! { list, joined.clone(), |i| Int (vec![i.int(), i.int()], 0): int_cat }

    let picked = |rows, note| Spec::new(INDEXED, INTS, [main([5, 3], Mixed), rows]).note(note);
    cases! { list, picked(indices([4, 3], 5), "dim 0"), |i| Int (0, i.int(), i.int()): int_gather }
    cases! { list, picked(indices([7], 5), "dim 0"), |i| Int (i.int(), 0, i.int()): int_select }
    let added = |rows, values, note| Spec::new(INDEXED, INTS, [main([5, 3], Mixed), rows, values]).note(note);
    cases! { list, added(indices([4, 3], 5), main([4, 3], Mixed), "dim 0"), |i| Int (0, i.int(), i.int(), i.int()):
        int_scatter_add
    }
    cases! { list, added(indices([7], 5), main([7, 3], Mixed), "dim 0"), |i| Int (i.int(), 0, i.int(), i.int()):
        int_select_add
    }
    let nd = Spec::new(INDEXED, I64, [main([5, 3], Mixed), indices([4, 1], 5), main([4, 3], Mixed)]).note("add");
    cases! { list, nd.clone(), |i| Int (i.int(), i.int(), i.int(), IndexingUpdateOp::Add): int_scatter_nd }
    cases! { list, Spec::new(INDEXED, I64, [main([5, 3], Mixed), indices([4, 1], 5)]), |i| Int (i.int(), i.int()):
        int_gather_nd
    }
}

fn reduces<B: Backend>(list: &mut Vec<Case<B>>) {
    // Flex multiplies and averages fewer dtypes than it stores.
    let matmul = Spec::new(MATMUL, &INTS[..2], [main([5, 4], Small), main([4, 3], Small)])
        .or([main([2, 5, 4], Small), main([1, 4, 3], Small)]);
    cases! { list, matmul.clone(), |i| Int (i.int(), i.int()): int_matmul }

    let all = |rule, values| reductions(rule, INTS, values);
    let along = |rule, values, note| reductions(rule, INTS, values).note(note);
    cases! { list, all(ADDS_UP, Ties), |i| Int (i.int()): int_sum }
    cases! { list, all(ADDS_UP, Mixed), |i| Int (i.int()): int_max int_min int_max_abs }
    cases! { list, all(TAKES_ALL, Small), |i| Int (i.int()): int_prod }
    cases! { list, reductions(ADDS_UP_LATER, SIGNED, Small), |i| Int (i.int()): int_mean }
    cases! { list, along(ADDS_UP, Ties, "dim 0"), |i| Int (i.int(), 0):
        int_sum_dim int_max_dim int_min_dim int_max_abs_dim
    }
    cases! { list, along(ADDS_UP, Mixed, "dim 1"), |i| Int (i.int(), 1):
        int_sum_dim int_max_dim int_min_dim int_max_abs_dim
    }
    cases! { list, along(TAKES_ALL, Small, "dim 0"), |i| Int (i.int(), 0): int_prod_dim }
    cases! { list, along(ADDS_UP_LATER, Small, "dim 0"), |i| Int (i.int(), 0): int_mean_dim }
    cases! { list, along(ALONG, Small, "dim 0"), |i| Int (i.int(), 0): int_cumsum int_cumprod int_cummin int_cummax }
    cases! { list, reductions(TAKES_ALL, SIGNED, Ties).note("dim 0"), |i| Int (i.int(), 0): int_argmax int_argmin }
    cases! { list, along(TAKES_ALL, Ties, "dim 0"), |i| (Int, Int) (i.int(), 0):
        int_max_dim_with_indices int_min_dim_with_indices
    }
    cases! { list, along(ALONG, Distinct, "dim 0, 2 of 5"), |i| Int (i.int(), 0, 2): int_topk }
    let absent = |note| Spec::new(ALONG, I64, [main([5, 3], Distinct)]).note(note).expect(Expected::Panic);
    cases! { list, absent("not in Flex"), |i| Int (i.int(), 0, 2): int_argtopk }
    cases! { list, along(ALONG, Distinct, "dim 0"), |i| Int (i.int(), 0, true): int_sort int_argsort }
    cases! { list, along(ALONG, Distinct, "dim 0"), |i| (Int, Int) (i.int(), 0, false): int_sort_with_indices }
    cases! { list, all(ADDS_UP, Below(2)), |i| Bool (i.int(), BoolDType::Native): int_any int_all }
    cases! { list, along(ADDS_UP, Below(2), "dim 0"), |i| Bool (i.int(), 0, BoolDType::Native):
        int_any_dim int_all_dim
    }
}
