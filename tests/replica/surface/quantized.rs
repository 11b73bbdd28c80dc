//! `QTensorOps` and `TransactionOps`.

use burn::tensor::{DType, IntDType, Scalar, Shape, Slice, TensorPrimitive, backend::Backend};
use burn_backend::{
    BoolDType, FloatDType,
    ops::TransactionPrimitive,
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    read_sync,
};

use super::{
    case::{Any, Case, Expected, F32, Input, Of, Spec, Values, Values::*, indices, main, quantized},
    rules::*,
};

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list = Vec::new();
    makes_and_reads(&mut list);
    moves(&mut list);
    computes(&mut list);
    reduces(&mut list);
    transaction(&mut list);
    list
}

/// One quantized tensor.
fn spec(values: Values) -> Spec {
    Spec::new(DECOMPOSED, F32, [quantized([5, 4], values)])
}

fn makes_and_reads<B: Backend>(list: &mut Vec<Case<B>>) {
    let one = |rule| Spec::new(rule, F32, [quantized([5, 4], Mixed)]);
    let scheme = QuantScheme::default;
    cases! { list, Spec::new(QUANTIZED, F32, [main([5, 4], Mixed)]), |i| Quantized (i.float(), &scheme()):
        quantize_dynamic
    }
    let scaled = Spec::new(QUANTIZED, F32, [main([5, 4], Mixed), main([1], Values::Positive)]);
    cases! { list, scaled.clone(),
        |i| Quantized (i.float(), &scheme(), QuantizationParametersPrimitive { scales: i.float() }): quantize
    }
    cases! { list, one(QUANTIZED), |i| Float (i.quantized(), FloatDType::F32): dequantize }
    cases! { list, one(READ), q_into_data: |i| vec![Any::read(read_sync(B::q_into_data(i.quantized())))] }
    cases! { list, one(NO_INPUT), q_from_data: |i| {
        let data = read_sync(B::q_into_data(i.quantized())).unwrap();
        vec![Any::Quantized(B::q_from_data(data, &i.device))]
    } }
    cases! { list, one(ANSWER), q_device: |i| vec![Any::answer(B::q_device(&i.quantized()) == i.device)] }
    cases! { list, one(READ).note("to another device"), q_to_device: |i| {
        let elsewhere = i.elsewhere.clone();
        vec![Any::Quantized(B::q_to_device(i.quantized(), &elsewhere))]
    } }
    cases! { list, one(HANDLE), |i| Quantized (i.quantized()): q_detach }
    cases! { list, one(HANDLE), |i| Quantized (i.quantized(), true): q_set_require_grad }
    cases! { list, one(ANSWER), q_is_require_grad: |i| vec![Any::answer(B::q_is_require_grad(&i.quantized()))] }
}

fn moves<B: Backend>(list: &mut Vec<Case<B>>) {
    let view = |note| Spec::new(QUANTIZED, F32, [quantized([5, 4], Mixed)]).note(note);
    cases! { list, view("to [2, 10]"), |i| Quantized (i.quantized(), Shape::from([2, 10])): q_reshape }
    cases! { list, view("to [3, 5, 4]"), |i| Quantized (i.quantized(), Shape::from([3, 5, 4])): q_expand }
    cases! { list, view(""), |i| Quantized (i.quantized()): q_transpose }
    cases! { list, view("0 and 1"), |i| Quantized (i.quantized(), 0, 1): q_swap_dims }
    cases! { list, view("[1, 0]"), |i| Quantized (i.quantized(), &[1, 0]): q_permute }
    cases! { list, view("dim 0"), |i| Quantized (i.quantized(), &[0]): q_flip }
    cases! { list, view("1..4 of dim 0"), |i| Quantized (i.quantized(), &[Slice::from(1..4), Slice::from(0..4)]):
        q_slice
    }
    let picked = |rows| Spec::new(QUANTIZED, F32, [quantized([5, 4], Mixed), rows]).note("dim 0");
    cases! { list, picked(indices([3], 5)), |i| Quantized (i.quantized(), 0, i.int()): q_select }
    cases! { list, picked(indices([3, 4], 5)), |i| Quantized (0, i.quantized(), i.int()): q_gather }
    cases! { list, spec(Mixed).note("dim 0, twice"), |i| Quantized (i.quantized(), 0, 2): q_repeat_dim }
    let joined = Spec::new(DECOMPOSED, F32, [quantized([5, 4], Mixed), quantized([3, 4], Positive)]).note("dim 0");
    cases! { list, joined.clone(), |i| Quantized (vec![i.quantized(), i.quantized()], 0): q_cat }
}

fn computes<B: Backend>(list: &mut Vec<Case<B>>) {
    let pair = |right| Spec::new(DECOMPOSED, F32, [quantized([5, 4], Positive), quantized([5, 4], right)]);
    let scalar = Scalar::Float;
    cases! { list, pair(Mixed), |i| primitive (i.quantized(), i.quantized()): q_add q_sub q_mul q_div q_powf }
    let powers = Input { dtype: Of::Always(DType::I64), ..main([5, 4], Below(4)) };
    let powi = Spec::new(DECOMPOSED, F32, [quantized([5, 4], Mixed), powers]);
    cases! { list, powi.clone(), |i| primitive (i.quantized(), i.int()): q_powi }
    cases! { list, spec(Positive).note("1.5"), |i| primitive (i.quantized(), scalar(1.5)):
        q_add_scalar q_sub_scalar q_mul_scalar q_div_scalar q_powf_scalar q_clamp_min q_clamp_max
    }
    cases! { list, spec(Mixed).note("3"), |i| primitive (i.quantized(), Scalar::Int(3)): q_powi_scalar }
    cases! { list, spec(Mixed).note("-1 to 1"), |i| primitive (i.quantized(), scalar(-1.0), scalar(1.0)): q_clamp }
    cases! { list, spec(Positive), |i| primitive (i.quantized()):
        q_neg q_recip q_exp q_log q_log1p q_sqrt q_cos q_sin q_tan q_cosh q_sinh q_tanh q_erf
    }
    cases! { list, spec(Mixed), |i| Quantized (i.quantized()): q_abs }
    let matmul = Spec::new(DECOMPOSED, F32, [quantized([5, 4], Mixed), quantized([4, 3], Mixed)]).within(64.0);
    cases! { list, matmul.clone(),
        |i| primitive (TensorPrimitive::QFloat(i.quantized()), TensorPrimitive::QFloat(i.quantized())): q_matmul
    }
    let mixed = Spec::new(DECOMPOSED, F32, [main([5, 4], Mixed), quantized([4, 3], Mixed)]).within(64.0);
    cases! { list, mixed.note("one of them float"),
        |i| primitive (TensorPrimitive::Float(i.float()), TensorPrimitive::QFloat(i.quantized())): q_matmul
    }
}

fn reduces<B: Backend>(list: &mut Vec<Case<B>>) {
    let dtype = IntDType::I64;
    let along = |values| spec(values).note("dim 0");
    cases! { list, spec(Mixed), |i| primitive (i.quantized()): q_sum q_prod q_mean }
    cases! { list, along(Mixed), |i| primitive (i.quantized(), 0):
        q_sum_dim q_prod_dim q_mean_dim q_cumsum q_cumprod q_cummin q_cummax
    }
    cases! { list, spec(Mixed), |i| Quantized (i.quantized()): q_max q_min q_max_abs }
    cases! { list, along(Mixed), |i| Quantized (i.quantized(), 0): q_max_dim q_min_dim q_max_abs_dim }
    cases! { list, along(Distinct), |i| (Quantized, Int) (i.quantized(), 0, dtype):
        q_max_dim_with_indices q_min_dim_with_indices
    }
    cases! { list, along(Distinct), |i| Int (i.quantized(), 0, dtype): q_argmax q_argmin }
    cases! { list, along(Distinct), |i| Quantized (i.quantized(), 0, 2): q_topk }
    cases! { list, along(Distinct).expect(Expected::Panic).note("not in Flex"), |i| Int (i.quantized(), 0, 2, dtype):
        q_argtopk
    }
    cases! { list, spec(Below(2)), |i| Bool (i.quantized(), BoolDType::Native): q_any q_all }
    cases! { list, along(Below(2)), |i| Bool (i.quantized(), 0, BoolDType::Native): q_any_dim q_all_dim }
    cases! { list, along(Distinct), |i| Quantized (i.quantized(), 0, true): q_sort }
    cases! { list, along(Distinct), |i| (Quantized, Int) (i.quantized(), 0, true, dtype): q_sort_with_indices }
    cases! { list, along(Distinct), |i| Int (i.quantized(), 0, true, dtype): q_argsort }
}

fn transaction<B: Backend>(list: &mut Vec<Case<B>>) {
    let flags = Input { dtype: Of::Always(super::case::BOOL), ..main([4], Mixed) };
    let inputs = [main([5, 3], Mixed), main([7], Mixed), quantized([5, 4], Mixed), indices([3], 9), flags];
    let spec = Spec::new(READ, F32, inputs);
    cases! { list, spec.clone(), tr_execute: |i| {
        let (floats, quantized) = (vec![i.float(), i.float()], vec![i.quantized()]);
        let transaction = TransactionPrimitive::<B>::new(floats, quantized, vec![i.int()], vec![i.bool()]);
        let read = read_sync(B::tr_execute(transaction)).unwrap();
        let kinds = [read.read_floats, read.read_qfloats, read.read_ints, read.read_bools];
        kinds.into_iter().flatten().map(Any::Data).collect()
    } }
}
