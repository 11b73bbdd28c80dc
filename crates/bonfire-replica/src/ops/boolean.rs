use bonfire_placement::Reduction;
use burn_backend::{
    BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData, TensorMetadata,
    ops::BoolTensorOps,
    tensor::{BoolTensor, Device, FloatTensor, IntTensor},
};

use super::*;
use crate::{Member, Replica, ReplicaTensor, read::into_data, transfer::to_device};

impl<B: Member> BoolTensorOps<Self> for Replica<B> {
    fn bool_from_data(data: TensorData, device: &Device<Self>) -> BoolTensor<Self> {
        ReplicaTensor::fresh(B::bool_from_data(data, device.group.home()), device)
    }

    fn bool_empty(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> {
        ReplicaTensor::fresh(B::bool_empty(shape, device.group.home(), dtype), device)
    }

    fn bool_zeros(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> {
        ReplicaTensor::fill(shape, Scalar::Bool(false), dtype.into(), device)
    }

    fn bool_ones(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self> {
        ReplicaTensor::fill(shape, Scalar::Bool(true), dtype.into(), device)
    }

    async fn bool_into_data(tensor: BoolTensor<Self>) -> Result<TensorData, ExecutionError> {
        into_data(tensor).await
    }

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn bool_to_device(tensor: BoolTensor<Self>, device: &Device<Self>) -> BoolTensor<Self> {
        to_device(tensor, device, B::bool_from_data)
    }

    fn bool_into_int(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> {
        unary("bool_into_int", tensor, out_dtype, move |x| B::bool_into_int(x, out_dtype))
    }

    fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        unary("bool_into_float", tensor, out_dtype, move |x| B::bool_into_float(x, out_dtype))
    }

    fn bool_not(tensor: BoolTensor<Self>) -> BoolTensor<Self> {
        let dtype = tensor.dtype();
        unary("bool_not", tensor, dtype, B::bool_not)
    }

    binary_methods! { BoolTensor:
        bool_equal bool_not_equal bool_and bool_or bool_xor
    }

    scalar_methods! { BoolTensor:
        bool_equal_elem bool_not_equal_elem
    }

    fn bool_mask_where(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self> {
        mask_where("bool_mask_where", tensor, mask, value, B::bool_mask_where)
    }

    fn bool_mask_fill(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> BoolTensor<Self> {
        let dtype = tensor.dtype();
        binary("bool_mask_fill", tensor, mask, dtype, move |x, m| B::bool_mask_fill(x, m, value))
    }

    view_methods! { BoolTensor:
        bool_transpose bool_swap_dims bool_permute bool_flip bool_reshape bool_expand bool_repeat_dim bool_unfold
        bool_slice bool_slice_assign bool_cat bool_gather bool_select
    }

    fn bool_scatter_or(
        dim: usize,
        tensor: BoolTensor<Self>,
        indices: IntTensor<Self>,
        value: BoolTensor<Self>,
    ) -> BoolTensor<Self> {
        scatter("bool_scatter_or", dim, tensor, indices, value, move |x, i, v| B::bool_scatter_or(dim, x, i, v))
    }

    fn bool_select_or(
        tensor: BoolTensor<Self>,
        dim: usize,
        indices: IntTensor<Self>,
        value: BoolTensor<Self>,
    ) -> BoolTensor<Self> {
        select_assign("bool_select_or", tensor, dim, indices, value, move |x, i, v| B::bool_select_or(x, dim, i, v))
    }

    fn bool_any(tensor: BoolTensor<Self>) -> BoolTensor<Self> {
        let dtype = tensor.dtype();
        reduce_all("bool_any", tensor, Reduction::Max, dtype, |x, _| B::bool_any(x))
    }

    fn bool_any_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self> {
        let dtype = tensor.dtype();
        reduce_dim("bool_any_dim", tensor, dim, Reduction::Max, dtype, move |x, _| B::bool_any_dim(x, dim))
    }

    fn bool_all(tensor: BoolTensor<Self>) -> BoolTensor<Self> {
        let dtype = tensor.dtype();
        reduce_all("bool_all", tensor, Reduction::Min, dtype, |x, _| B::bool_all(x))
    }

    fn bool_all_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self> {
        let dtype = tensor.dtype();
        reduce_dim("bool_all_dim", tensor, dim, Reduction::Min, dtype, move |x, _| B::bool_all_dim(x, dim))
    }
}
