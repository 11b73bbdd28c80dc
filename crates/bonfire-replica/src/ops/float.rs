use bonfire_placement::Reduction;
use burn_backend::{
    BoolDType, DType, Distribution, ExecutionError, FloatDType, IntDType, MetadataError, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
    ops::{FloatTensorOps, GridSampleOptions},
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor},
};

use super::*;
use crate::{Member, Replica, ReplicaTensor, read::into_data, transfer::to_device};

impl<B: Member> FloatTensorOps<Self> for Replica<B> {
    fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
        ReplicaTensor::fresh(B::float_from_data(data, device.group.home()), device)
    }

    /// Drawn in program order, as [`RandomMode`](crate::RandomMode) says.
    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let stream = |shape, home: &_| B::float_random(shape, distribution, home, dtype);
        ReplicaTensor::drawn(shape, distribution, dtype.into(), device, stream)
    }

    fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        ReplicaTensor::fill(shape, Scalar::Float(0.0), dtype.into(), device)
    }

    fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        ReplicaTensor::fill(shape, Scalar::Float(1.0), dtype.into(), device)
    }

    fn float_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        ReplicaTensor::fill(shape, fill_value, dtype.into(), device)
    }

    fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        ReplicaTensor::fresh(B::float_empty(shape, device.group.home(), dtype), device)
    }

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        into_data(tensor).await
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        to_device(tensor, device, B::float_from_data)
    }

    fn float_into_int(tensor: FloatTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> {
        unary("float_into_int", tensor, out_dtype, move |x| B::float_into_int(x, out_dtype))
    }

    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        // A sum is formed before it loses digits.
        let narrows = DType::from(dtype).size() < tensor.dtype().size();
        let linearity = if narrows { Linearity::Nonlinear } else { Linearity::Scaling };
        on_each("float_cast", linearity, tensor, dtype, move |x| B::float_cast(x, dtype))
    }

    unary_methods! { FloatTensor:
        float_recip float_exp float_log float_log1p float_sqrt float_abs float_cos float_sin float_tan
        float_cosh float_sinh float_tanh float_acos float_acosh float_asin float_asinh float_atan float_atanh
        float_round float_floor float_ceil float_trunc float_erf float_sign
    }

    scalar_methods! { FloatTensor:
        float_add_scalar float_sub_scalar float_remainder_scalar
        float_powi_scalar float_powi_scalar_impl float_powf_scalar float_powf_scalar_impl
        float_clamp_min float_clamp_max
    }

    fn float_neg(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        on_each("float_neg", Linearity::Linear, tensor, dtype, B::float_neg)
    }

    additive_methods! { FloatTensor:
        float_add float_sub
    }

    fn float_mul_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> {
        let dtype = lhs.dtype();
        on_each("float_mul_scalar", of_factor(dtype, rhs.elem()), lhs, dtype, move |x| B::float_mul_scalar(x, rhs))
    }

    fn float_div_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self> {
        let dtype = lhs.dtype();
        let linearity = of_factor(dtype, 1.0 / rhs.elem::<f64>());
        on_each("float_div_scalar", linearity, lhs, dtype, move |x| B::float_div_scalar(x, rhs))
    }

    binary_methods! { FloatTensor:
        float_mul float_div float_remainder float_powf float_atan2
    }

    compare_methods! { FloatTensor:
        float_equal float_not_equal float_greater float_greater_equal float_lower float_lower_equal
    }

    compare_scalar_methods! { FloatTensor:
        float_equal_elem float_not_equal_elem float_greater_elem float_greater_equal_elem float_lower_elem
        float_lower_equal_elem
    }

    fn float_powi(lhs: FloatTensor<Self>, rhs: IntTensor<Self>) -> FloatTensor<Self> {
        let dtype = lhs.dtype();
        binary("float_powi", lhs, rhs, dtype, B::float_powi)
    }

    fn float_clamp(tensor: FloatTensor<Self>, min: Scalar, max: Scalar) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        unary("float_clamp", tensor, dtype, move |x| B::float_clamp(x, min, max))
    }

    fn float_is_nan(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        unary("float_is_nan", tensor, out_dtype, move |x| B::float_is_nan(x, out_dtype))
    }

    fn float_is_inf(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        unary("float_is_inf", tensor, out_dtype, move |x| B::float_is_inf(x, out_dtype))
    }

    fn float_mask_where(
        tensor: FloatTensor<Self>,
        mask: BoolTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        mask_where("float_mask_where", tensor, mask, value, B::float_mask_where)
    }

    fn float_mask_fill(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        binary("float_mask_fill", tensor, mask, dtype, move |x, m| B::float_mask_fill(x, m, value))
    }

    fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        matmul("float_matmul", lhs, rhs, B::float_matmul)
    }

    fn float_cross(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let spec = Spec::inferred(broadcast(&[&lhs.shape(), &rhs.shape()]), lhs.dtype());
        apply(
            Call::light("float_cross"),
            (lhs, rhs),
            |_| (Rule::new(aligned(vec![dim])), spec),
            move |(x, y), _| B::float_cross(x, y, dim),
        )
    }

    view_methods! { FloatTensor:
        float_transpose float_swap_dims float_permute float_flip float_reshape float_expand float_repeat_dim
        float_unfold float_slice float_slice_assign float_cat float_gather float_select
    }

    fn float_scatter_add(
        dim: usize,
        tensor: FloatTensor<Self>,
        indices: IntTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        scatter("float_scatter_add", dim, tensor, indices, value, move |x, i, v| B::float_scatter_add(dim, x, i, v))
    }

    fn float_scatter_nd(
        data: FloatTensor<Self>,
        indices: IntTensor<Self>,
        values: FloatTensor<Self>,
        reduction: IndexingUpdateOp,
    ) -> FloatTensor<Self> {
        let body = move |x, i, v| B::float_scatter_nd(x, i, v, reduction);
        scatter_nd("float_scatter_nd", data, indices, values, reduction, body)
    }

    fn float_gather_nd(data: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self> {
        gather_nd("float_gather_nd", data, indices, B::float_gather_nd)
    }

    fn float_select_add(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices: IntTensor<Self>,
        value: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        select_assign("float_select_add", tensor, dim, indices, value, move |x, i, v| B::float_select_add(x, dim, i, v))
    }

    reduce_all_methods! { FloatTensor:
        float_prod Whole
        float_max Max
        float_min Min
        float_max_abs Max
    }

    reduce_dim_methods! { FloatTensor:
        float_prod_dim Whole
        float_max_dim Max
        float_min_dim Min
        float_max_abs_dim Max
    }

    along_methods! { FloatTensor:
        float_cumsum float_cumprod float_cummin float_cummax
    }

    fn float_sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        reduce_all("float_sum", tensor, partial(dtype, Reduction::Sum), dtype, |x, _| B::float_sum(x))
    }

    fn float_sum_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        let reduction = partial(dtype, Reduction::Sum);
        reduce_dim("float_sum_dim", tensor, dim, reduction, dtype, move |x, part| {
            B::float_sum_dim(if part.is_member() { B::summable(x, dim) } else { x }, dim)
        })
    }

    fn float_mean(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        let (dtype, num_elements) = (tensor.dtype(), tensor.shape().num_elements());
        reduce_all("float_mean", tensor, partial(dtype, Reduction::Mean), dtype, move |x, part| {
            match part.is_partial(0) {
                true => B::float_div_scalar(B::float_sum(x), count(num_elements)),
                false => B::float_mean(x),
            }
        })
    }

    fn float_mean_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
        let (dtype, num_rows) = (tensor.dtype(), length(&tensor.shape(), dim));
        let reduction = partial(dtype, Reduction::Mean);
        reduce_dim("float_mean_dim", tensor, dim, reduction, dtype, move |x, part| match part.is_partial(0) {
            true => B::float_div_scalar(B::float_sum_dim(B::summable(x, dim), dim), count(num_rows)),
            false if part.is_member() => B::float_mean_dim(B::summable(x, dim), dim),
            false => B::float_mean_dim(x, dim),
        })
    }

    fn float_argmax(tensor: FloatTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> {
        along("float_argmax", tensor, dim, 1, out_dtype, move |x| B::float_argmax(x, dim, out_dtype))
    }

    fn float_argmin(tensor: FloatTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self> {
        along("float_argmin", tensor, dim, 1, out_dtype, move |x| B::float_argmin(x, dim, out_dtype))
    }

    fn float_argtopk(tensor: FloatTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self> {
        along("float_argtopk", tensor, dim, k, out_dtype, move |x| B::float_argtopk(x, dim, k, out_dtype))
    }

    fn float_topk(tensor: FloatTensor<Self>, dim: usize, k: usize) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        along("float_topk", tensor, dim, k, dtype, move |x| B::float_topk(x, dim, k))
    }

    fn float_max_dim_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        along_with_indices("float_max_dim_with_indices", tensor, dim, 1, Some(indices_dtype.into()), move |x| {
            B::float_max_dim_with_indices(x, dim, indices_dtype)
        })
    }

    fn float_min_dim_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        along_with_indices("float_min_dim_with_indices", tensor, dim, 1, Some(indices_dtype.into()), move |x| {
            B::float_min_dim_with_indices(x, dim, indices_dtype)
        })
    }

    fn float_any(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_all("float_any", tensor, Reduction::Max, out_dtype, move |x, _| B::float_any(x, out_dtype))
    }

    fn float_any_dim(tensor: FloatTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_dim("float_any_dim", tensor, dim, Reduction::Max, out_dtype, move |x, _| {
            B::float_any_dim(x, dim, out_dtype)
        })
    }

    fn float_all(tensor: FloatTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_all("float_all", tensor, Reduction::Min, out_dtype, move |x, _| B::float_all(x, out_dtype))
    }

    fn float_all_dim(tensor: FloatTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self> {
        reduce_dim("float_all_dim", tensor, dim, Reduction::Min, out_dtype, move |x, _| {
            B::float_all_dim(x, dim, out_dtype)
        })
    }

    fn float_sort(tensor: FloatTensor<Self>, dim: usize, descending: bool) -> FloatTensor<Self> {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        along("float_sort", tensor, dim, length(&shape, dim), dtype, move |x| B::float_sort(x, dim, descending))
    }

    fn float_sort_with_indices(
        tensor: FloatTensor<Self>,
        dim: usize,
        descending: bool,
        indices_dtype: IntDType,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let rows = length(&tensor.shape(), dim);
        along_with_indices("float_sort_with_indices", tensor, dim, rows, Some(indices_dtype.into()), move |x| {
            B::float_sort_with_indices(x, dim, descending, indices_dtype)
        })
    }

    fn float_argsort(tensor: FloatTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self> {
        let rows = length(&tensor.shape(), dim);
        along("float_argsort", tensor, dim, rows, out_dtype, move |x| B::float_argsort(x, dim, descending, out_dtype))
    }

    fn float_grid_sample_2d(
        tensor: FloatTensor<Self>,
        grid: FloatTensor<Self>,
        options: GridSampleOptions,
    ) -> FloatTensor<Self> {
        let shape = match (&tensor.shape()[..], &grid.shape()[..]) {
            (&[batch, channels, _, _], &[_, height, width, _]) => Ok(Shape::from([batch, channels, height, width])),
            _ => Err(MetadataError::RankMismatch { left: tensor.rank(), right: 4 }),
        };
        let spec = Spec::inferred(shape, tensor.dtype());
        let op = batch_shared(vec![0], vec![Role::Split, Role::Split], vec![Yield::Split]);
        apply(
            Call::light("float_grid_sample_2d"),
            (tensor, grid),
            |_| (Rule::new(op), spec),
            move |(x, g), _| B::float_grid_sample_2d(x, g, options.clone()),
        )
    }
}

/// Of a multiplication by `factor`. A sum is scaled part by part, but not by what is no number (an empty member's zero
/// would become NaN), and not in halves, whose parts may vanish where the sum would not.
#[inline]
fn of_factor(dtype: DType, factor: f64) -> Linearity {
    match factor.is_finite() && !matches!(dtype, DType::F16 | DType::BF16) {
        true => Linearity::Scaling,
        false => Linearity::Nonlinear,
    }
}

/// Halves see everything: a member's sum could overflow, or lose digits, where the whole one would not. (Weight
/// gradients and products along a shared dim are summed over members all the same: gathering there costs too much.)
fn partial(dtype: DType, reduction: Reduction) -> Reduction {
    match dtype {
        DType::F16 | DType::BF16 => Reduction::Whole,
        _ => reduction,
    }
}

fn count(num: usize) -> Scalar {
    Scalar::Float(num as f64)
}
