use std::ops::Range;

use bonfire_placement::Reduction;
use burn_backend::{
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata,
    ops::IntTensorOps,
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::*;
use crate::{Member, Replica, ReplicaTensor, read::into_data, transfer::to_device};

impl<B: Member> IntTensorOps<Self> for Replica<B> {
    fn int_from_data(data: TensorData, device: &Device<Self>) -> IntTensor<Self> {
        ReplicaTensor::fresh(B::int_from_data(data, device.group.home()), device)
    }

    /// Drawn in program order, as [`RandomMode`](crate::RandomMode) says.
    fn int_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        let stream = |shape, home: &_| B::int_random(shape, distribution, home, dtype);
        ReplicaTensor::drawn(shape, distribution, dtype.into(), device, stream)
    }

    fn int_empty(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        ReplicaTensor::fresh(B::int_empty(shape, device.group.home(), dtype), device)
    }

    fn int_zeros(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        ReplicaTensor::fill(shape, Scalar::Int(0), dtype.into(), device)
    }

    fn int_ones(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        ReplicaTensor::fill(shape, Scalar::Int(1), dtype.into(), device)
    }

    fn int_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        ReplicaTensor::fill(shape, fill_value, dtype.into(), device)
    }

    fn int_arange(range: Range<i64>, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        ReplicaTensor::fresh(B::int_arange(range, device.group.home(), dtype), device)
    }

    fn int_arange_step(range: Range<i64>, step: usize, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self> {
        ReplicaTensor::fresh(B::int_arange_step(range, step, device.group.home(), dtype), device)
    }

    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        into_data(tensor).await
    }

    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn int_to_device(tensor: IntTensor<Self>, device: &Device<Self>) -> IntTensor<Self> {
        to_device(tensor, device, B::int_from_data)
    }

    fn int_into_float(tensor: IntTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        unary("int_into_float", tensor, out_dtype, move |x| B::int_into_float(x, out_dtype))
    }

    fn int_cast(tensor: IntTensor<Self>, dtype: IntDType) -> IntTensor<Self> {
        unary("int_cast", tensor, dtype, move |x| B::int_cast(x, dtype))
    }

    unary_methods! { IntTensor:
        int_neg int_abs int_sign bitwise_not
    }

    scalar_methods! { IntTensor:
        int_add_scalar int_sub_scalar int_mul_scalar int_div_scalar int_remainder_scalar int_powi_scalar
        int_powi_scalar_impl int_clamp_min int_clamp_max bitwise_and_scalar bitwise_or_scalar bitwise_xor_scalar
        bitwise_left_shift_scalar bitwise_right_shift_scalar
    }

    additive_methods! { IntTensor:
        int_add int_sub
    }

    binary_methods! { IntTensor:
        int_mul int_div int_remainder int_powi bitwise_and bitwise_or bitwise_xor bitwise_left_shift
        bitwise_right_shift
    }

    compare_methods! { IntTensor:
        int_equal int_not_equal int_greater int_greater_equal int_lower int_lower_equal
    }

    compare_scalar_methods! { IntTensor:
        int_equal_elem int_not_equal_elem int_greater_elem int_greater_equal_elem int_lower_elem int_lower_equal_elem
    }

    fn int_clamp(tensor: IntTensor<Self>, min: Scalar, max: Scalar) -> IntTensor<Self> {
        let dtype = tensor.dtype();
        unary("int_clamp", tensor, dtype, move |x| B::int_clamp(x, min, max))
    }

    fn int_mask_where(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self> {
        mask_where("int_mask_where", tensor, mask, value, B::int_mask_where)
    }

    fn int_mask_fill(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> IntTensor<Self> {
        let dtype = tensor.dtype();
        binary("int_mask_fill", tensor, mask, dtype, move |x, m| B::int_mask_fill(x, m, value))
    }

    fn int_matmul(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self> {
        matmul("int_matmul", lhs, rhs, B::int_matmul)
    }

    view_methods! { IntTensor:
        int_transpose int_swap_dims int_permute int_flip int_reshape int_expand int_repeat_dim int_unfold int_slice
        int_slice_assign int_cat int_gather int_select
    }

    fn int_scatter_add(
        dim: usize,
        tensor: IntTensor<Self>,
        indices: IntTensor<Self>,
        value: IntTensor<Self>,
    ) -> IntTensor<Self> {
        scatter("int_scatter_add", dim, tensor, indices, value, move |x, i, v| B::int_scatter_add(dim, x, i, v))
    }

    fn int_scatter_nd(
        data: IntTensor<Self>,
        indices: IntTensor<Self>,
        values: IntTensor<Self>,
        reduction: IndexingUpdateOp,
    ) -> IntTensor<Self> {
        let body = move |x, i, v| B::int_scatter_nd(x, i, v, reduction);
        scatter_nd("int_scatter_nd", data, indices, values, reduction, body)
    }

    fn int_gather_nd(data: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self> {
        gather_nd("int_gather_nd", data, indices, B::int_gather_nd)
    }

    fn int_select_add(
        tensor: IntTensor<Self>,
        dim: usize,
        indices: IntTensor<Self>,
        value: IntTensor<Self>,
    ) -> IntTensor<Self> {
        select_assign("int_select_add", tensor, dim, indices, value, move |x, i, v| B::int_select_add(x, dim, i, v))
    }

    reduce_all_methods! { IntTensor:
        int_sum Sum
        int_prod Whole
        int_max Max
        int_min Min
        int_max_abs Max
    }

    reduce_dim_methods! { IntTensor:
        int_sum_dim Sum
        int_prod_dim Whole
        int_max_dim Max
        int_min_dim Min
        int_max_abs_dim Max
    }

    along_methods! { IntTensor:
        int_cumsum int_cumprod int_cummin int_cummax
    }

    fn int_mean(tensor: IntTensor<Self>) -> IntTensor<Self> {
        let (dtype, num) = (tensor.dtype(), tensor.shape().num_elements());
        if shared_dim(&tensor).is_some() && divides(dtype, num) {
            return Self::int_div_scalar(Self::int_sum(tensor), Scalar::Int(num as i64));
        }
        reduce_all("int_mean", tensor, Reduction::Whole, dtype, |x, _| B::int_mean(x))
    }

    fn int_mean_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        let (dtype, num) = (tensor.dtype(), length(&tensor.shape(), dim));
        if shared_dim(&tensor) == Some(dim) && divides(dtype, num) {
            return Self::int_div_scalar(Self::int_sum_dim(tensor, dim), Scalar::Int(num as i64));
        }
        reduce_dim("int_mean_dim", tensor, dim, Reduction::Whole, dtype, move |x, _| B::int_mean_dim(x, dim))
    }

    fn int_argmax(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        indices_along("int_argmax", tensor, dim, 1, move |x| B::int_argmax(x, dim))
    }

    fn int_argmin(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self> {
        indices_along("int_argmin", tensor, dim, 1, move |x| B::int_argmin(x, dim))
    }

    fn int_argtopk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self> {
        indices_along("int_argtopk", tensor, dim, k, move |x| B::int_argtopk(x, dim, k))
    }

    fn int_topk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self> {
        let dtype = tensor.dtype();
        along("int_topk", tensor, dim, k, dtype, move |x| B::int_topk(x, dim, k))
    }

    fn int_max_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>) {
        along_with_indices("int_max_dim_with_indices", tensor, dim, 1, None, move |x| {
            B::int_max_dim_with_indices(x, dim)
        })
    }

    fn int_min_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>) {
        along_with_indices("int_min_dim_with_indices", tensor, dim, 1, None, move |x| {
            B::int_min_dim_with_indices(x, dim)
        })
    }

    fn int_any(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_all("int_any", tensor, Reduction::Max, out_dtype, move |x, _| B::int_any(x, out_dtype))
    }

    fn int_any_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_dim("int_any_dim", tensor, dim, Reduction::Max, out_dtype, move |x, _| B::int_any_dim(x, dim, out_dtype))
    }

    fn int_all(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_all("int_all", tensor, Reduction::Min, out_dtype, move |x, _| B::int_all(x, out_dtype))
    }

    fn int_all_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_dim("int_all_dim", tensor, dim, Reduction::Min, out_dtype, move |x, _| B::int_all_dim(x, dim, out_dtype))
    }

    fn int_sort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self> {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        along("int_sort", tensor, dim, length(&shape, dim), dtype, move |x| B::int_sort(x, dim, descending))
    }

    fn int_sort_with_indices(
        tensor: IntTensor<Self>,
        dim: usize,
        descending: bool,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        let rows = length(&tensor.shape(), dim);
        along_with_indices("int_sort_with_indices", tensor, dim, rows, None, move |x| {
            B::int_sort_with_indices(x, dim, descending)
        })
    }

    fn int_argsort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self> {
        let rows = length(&tensor.shape(), dim);
        indices_along("int_argsort", tensor, dim, rows, move |x| B::int_argsort(x, dim, descending))
    }
}

/// Whether the mean of so many is their sum divided: wide integers hold both.
fn divides(dtype: DType, num: usize) -> bool {
    matches!(dtype, DType::I64 | DType::I32) && (1..=i32::MAX as usize).contains(&num)
}
