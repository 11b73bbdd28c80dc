//! `BoolTensorOps`.

use burn::tensor::{IntDType, Scalar, Shape, Slice, TensorData, backend::Backend};
use burn_backend::{FloatDType, TensorMetadata, read_sync};

use super::{
    case::{Any, BOOLS, Case, Spec, Values::*, indices, main},
    rules::*,
    tables::{binary, broadcast_mask, one, reductions},
};

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list: Vec<Case<B>> = Vec::new();
    let shape = || Shape::from([5, 3]);
    let none = || Spec::new(NO_INPUT, BOOLS, []);
    let value = |rule| Spec::new(rule, BOOLS, [main([5, 3], Mixed)]).or([main([7], Mixed)]).or([main([0, 2], Mixed)]);
    cases! { list, none(), |i| Bool (shape(), &i.device, i.dtype.into()): bool_zeros bool_ones }
    cases! { list, none().note("of any values"), bool_empty: |i| {
        let tensor = B::bool_empty(shape(), &i.device, i.dtype.into());
        vec![Any::described(tensor.shape(), tensor.dtype())]
    } }
    cases! { list, value(READ), bool_into_data: |i| vec![Any::read(read_sync(B::bool_into_data(i.bool())))] }
    cases! { list, value(NO_INPUT), bool_from_data: |i| {
        let data: TensorData = read_sync(B::bool_into_data(i.bool())).unwrap();
        vec![Any::Bool(B::bool_from_data(data, &i.device))]
    } }
    cases! { list, value(ANSWER), bool_device: |i| vec![Any::answer(B::bool_device(&i.bool()) == i.device)] }
    cases! { list, value(READ).note("to another device"), bool_to_device: |i| {
        let elsewhere = i.elsewhere.clone();
        vec![Any::Bool(B::bool_to_device(i.bool(), &elsewhere))]
    } }
    cases! { list, value(HOST), bool_argwhere: |i| {
        vec![Any::Int(read_sync(B::bool_argwhere(i.bool(), IntDType::I64)))]
    } }

    let each = || one(ELEMENTWISE, BOOLS, Mixed);
    cases! { list, each(), |i| Bool (i.bool()): bool_not }
    cases! { list, each().note("true"), |i| Bool (i.bool(), Scalar::Bool(true)): bool_equal_elem bool_not_equal_elem }
    cases! { list, each().note("to i32"), |i| Int (i.bool(), IntDType::I32): bool_into_int }
    cases! { list, each().note("to f32"), |i| Float (i.bool(), FloatDType::F32): bool_into_float }
    cases! { list, binary(ELEMENTWISE, BOOLS, Mixed, Mixed), |i| Bool (i.bool(), i.bool()):
        bool_equal bool_not_equal bool_and bool_or bool_xor
    }
    cases! { list, broadcast_mask(BOOLS), |i| Bool (i.bool(), i.bool(), i.bool()): bool_mask_where }
    let filled = Spec::new(ELEMENTWISE, BOOLS, [main([5, 3], Mixed), main([5, 3], Mixed)]).note("true");
    cases! { list, filled.clone(), |i| Bool (i.bool(), i.bool(), Scalar::Bool(true)): bool_mask_fill }

    moves(&mut list);

    let all = || reductions(ADDS_UP, BOOLS, Mixed);
    cases! { list, all(), |i| Bool (i.bool()): bool_any bool_all }
    cases! { list, all().note("dim 0"), |i| Bool (i.bool(), 0): bool_any_dim bool_all_dim }
    cases! { list, all().note("dim 1"), |i| Bool (i.bool(), 1): bool_any_dim bool_all_dim }
    list
}

fn moves<B: Backend>(list: &mut Vec<Case<B>>) {
    let view = |note| Spec::new(VIEW, BOOLS, [main([5, 3, 4], Mixed)]).note(note);
    cases! { list, view("").or([main([5, 3], Mixed)]), |i| Bool (i.bool()): bool_transpose }
    cases! { list, view("0 and 2"), |i| Bool (i.bool(), 0, 2): bool_swap_dims }
    cases! { list, view("[2, 0, 1]"), |i| Bool (i.bool(), &[2, 0, 1]): bool_permute }
    cases! { list, view("dims 0 and 2"), |i| Bool (i.bool(), &[0, 2]): bool_flip }
    cases! { list, view("all dims"), |i| Bool (i.bool(), &[0, 1, 2]): bool_flip }
    cases! { list, view("to [15, 4]"), |i| Bool (i.bool(), Shape::from([15, 4])): bool_reshape }
    cases! { list, view("to [3, 20]"), |i| Bool (i.bool(), Shape::from([3, 20])): bool_reshape }
    let expanded = Spec::new(VIEW, BOOLS, [main([5, 1], Mixed)]).or([main([1, 3], Mixed)]).note("to [2, 5, 3]");
    cases! { list, expanded.clone(), |i| Bool (i.bool(), Shape::from([2, 5, 3])): bool_expand }
    cases! { list, view("dim 1, twice"), |i| Bool (i.bool(), 1, 2): bool_repeat_dim }
    cases! { list, view("dim 0, 2 by steps of 2"), |i| Bool (i.bool(), 0, 2, 2): bool_unfold }
    let slices = || [Slice::from(1..4), Slice::from(0..3), Slice::from(0..4)];
    cases! { list, view("1..4 of dim 0"), |i| Bool (i.bool(), &slices()): bool_slice }
    let assigned = Spec::new(VIEW, BOOLS, [main([5, 3, 4], Mixed), main([3, 3, 4], Mixed)]).note("1..4 of dim 0");
    cases! { list, assigned.clone(), |i| Bool (i.bool(), &slices(), i.bool()): bool_slice_assign }
    let joined = Spec::new(VIEW, BOOLS, [main([2, 3], Mixed), main([5, 3], Mixed)]).note("dim 0");
    cases! { list, joined.clone(), |i| Bool (vec![i.bool(), i.bool()], 0): bool_cat }
    let picked = |rows, note| Spec::new(INDEXED, BOOLS, [main([5, 3], Mixed), rows]).note(note);
    cases! { list, picked(indices([4, 3], 5), "dim 0"), |i| Bool (0, i.bool(), i.int()): bool_gather }
    cases! { list, picked(indices([7], 5), "dim 0"), |i| Bool (i.bool(), 0, i.int()): bool_select }
    let added = |rows, values, note| Spec::new(INDEXED, BOOLS, [main([5, 3], Mixed), rows, values]).note(note);
    cases! { list, added(indices([4, 3], 5), main([4, 3], Mixed), "dim 0"), |i| Bool (0, i.bool(), i.int(), i.bool()):
        bool_scatter_or
    }
    cases! { list, added(indices([7], 5), main([7, 3], Mixed), "dim 0"), |i| Bool (i.bool(), 0, i.int(), i.bool()):
        bool_select_or
    }
}
