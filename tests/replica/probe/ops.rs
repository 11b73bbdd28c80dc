//! Burn's operation traits: every method that Flex has a body for is handed to it. The others keep Burn's default, which
//! ends in the same methods of Flex.

use std::ops::Range;

use burn_backend::{
    BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    ops::{
        ActivationOps, AttentionModuleOptions, BoolTensorOps, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
        DeformConvOptions, FloatTensorOps, GridSampleOptions, IntTensorOps, InterpolateOptions, MaxPool2dBackward,
        MaxPool2dWithIndices, ModuleOps, QTensorOps,
    },
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    read_sync,
    tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor},
};
use burn_flex::Flex;

use super::{
    Probe,
    call::{Call, Open},
};

/// Methods by their signatures.
macro_rules! methods {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $out:ty;)*) => {$(
        fn $name($($arg: $type),*) -> $out {
            let mut call = Call::new(stringify!($name));
            $(let $arg = $arg.open(&mut call);)*
            call.run(|| <Flex>::$name($($arg),*))
        }
    )*};
}

macro_rules! unary {
    ($tensor:ident: $($name:ident)*) => {
        methods! { $(fn $name(tensor: $tensor<Self>) -> $tensor<Self>;)* }
    };
}

macro_rules! scalar {
    ($tensor:ident: $($name:ident)*) => {
        methods! { $(fn $name(lhs: $tensor<Self>, rhs: Scalar) -> $tensor<Self>;)* }
    };
}

macro_rules! binary {
    ($tensor:ident: $($name:ident)*) => {
        methods! { $(fn $name(lhs: $tensor<Self>, rhs: $tensor<Self>) -> $tensor<Self>;)* }
    };
}

macro_rules! compare {
    ($tensor:ident: $($name:ident)*) => {
        methods! { $(fn $name(lhs: $tensor<Self>, rhs: $tensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;)* }
    };
}

macro_rules! compare_scalar {
    ($tensor:ident: $($name:ident)*) => {
        methods! { $(fn $name(lhs: $tensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;)* }
    };
}

/// To another kind, whose dtype is given.
macro_rules! convert {
    ($tensor:ident -> $out:ident $dtype:ident: $($name:ident)*) => {
        methods! { $(fn $name(tensor: $tensor<Self>, out_dtype: $dtype) -> $out<Self>;)* }
    };
}

/// Reductions of a dim, and others along one.
macro_rules! along {
    ($tensor:ident: $($name:ident)*) => {
        methods! { $(fn $name(tensor: $tensor<Self>, dim: usize) -> $tensor<Self>;)* }
    };
}

/// As `along`, to another kind, whose dtype is given.
macro_rules! along_to {
    ($tensor:ident -> $out:ident $dtype:ident: $($name:ident)*) => {
        methods! { $(fn $name(tensor: $tensor<Self>, dim: usize, out_dtype: $dtype) -> $out<Self>;)* }
    };
}

macro_rules! fills {
    ($tensor:ident $dtype:ident: $($name:ident)*) => {
        methods! { $(fn $name(shape: Shape, device: &Device<Self>, dtype: $dtype) -> $tensor<Self>;)* }
    };
}

/// From and to the host and other devices, in this order: from_data, into_data, device, to_device.
macro_rules! transfers {
    ($tensor:ident: $from_data:ident $into_data:ident $device:ident $to_device:ident) => {
        async fn $into_data(tensor: $tensor<Self>) -> Result<TensorData, ExecutionError> {
            let mut call = Call::new(stringify!($into_data));
            let tensor = tensor.open(&mut call);
            call.run(|| read_sync(<Flex>::$into_data(tensor)))
        }

        fn $device(tensor: &$tensor<Self>) -> Device<Self> {
            tensor.device()
        }

        fn $to_device(tensor: $tensor<Self>, device: &Device<Self>) -> $tensor<Self> {
            let mut call = Call::new(stringify!($to_device));
            let (tensor, device) = (tensor.at(*device).open(&mut call), device.open(&mut call));
            call.run(|| <Flex>::$to_device(tensor, device))
        }

        methods! {
            fn $from_data(data: TensorData, device: &Device<Self>) -> $tensor<Self>;
        }
    };
}

/// Moves of elements that every kind has, in this order: swap_dims, permute, flip, reshape, expand, slice, gather,
/// select.
macro_rules! moves {
    (
        $tensor:ident: $swap_dims:ident $permute:ident $flip:ident $reshape:ident $expand:ident $slice:ident
        $gather:ident $select:ident
    ) => {
        methods! {
            fn $swap_dims(tensor: $tensor<Self>, dim1: usize, dim2: usize) -> $tensor<Self>;
            fn $permute(tensor: $tensor<Self>, axes: &[usize]) -> $tensor<Self>;
            fn $flip(tensor: $tensor<Self>, axes: &[usize]) -> $tensor<Self>;
            fn $reshape(tensor: $tensor<Self>, shape: Shape) -> $tensor<Self>;
            fn $expand(tensor: $tensor<Self>, shape: Shape) -> $tensor<Self>;
            fn $slice(tensor: $tensor<Self>, slices: &[Slice]) -> $tensor<Self>;
            fn $gather(dim: usize, tensor: $tensor<Self>, indices: IntTensor<Self>) -> $tensor<Self>;
            fn $select(tensor: $tensor<Self>, dim: usize, indices: IntTensor<Self>) -> $tensor<Self>;
        }
    };
}

/// Moves of elements that quantized tensors lack, in this order: transpose, repeat_dim, unfold, slice_assign, cat,
/// mask_where, mask_fill, scatter and select with an update.
macro_rules! more_moves {
    (
        $tensor:ident: $transpose:ident $repeat_dim:ident $unfold:ident $slice_assign:ident $cat:ident
        $mask_where:ident $mask_fill:ident $scatter:ident $select_assign:ident
    ) => {
        methods! {
            fn $transpose(tensor: $tensor<Self>) -> $tensor<Self>;
            fn $repeat_dim(tensor: $tensor<Self>, dim: usize, times: usize) -> $tensor<Self>;
            fn $unfold(tensor: $tensor<Self>, dim: usize, size: usize, step: usize) -> $tensor<Self>;
            fn $slice_assign(tensor: $tensor<Self>, slices: &[Slice], value: $tensor<Self>) -> $tensor<Self>;
            fn $cat(tensors: Vec<$tensor<Self>>, dim: usize) -> $tensor<Self>;
            fn $mask_where(tensor: $tensor<Self>, mask: BoolTensor<Self>, value: $tensor<Self>) -> $tensor<Self>;
            fn $mask_fill(tensor: $tensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> $tensor<Self>;
            fn $scatter(
                dim: usize, tensor: $tensor<Self>, indices: IntTensor<Self>, value: $tensor<Self>,
            ) -> $tensor<Self>;
            fn $select_assign(
                tensor: $tensor<Self>, dim: usize, indices: IntTensor<Self>, value: $tensor<Self>,
            ) -> $tensor<Self>;
        }
    };
}

impl FloatTensorOps<Self> for Probe {
    transfers! { FloatTensor: float_from_data float_into_data float_device float_to_device }

    moves! { FloatTensor:
        float_swap_dims float_permute float_flip float_reshape float_expand float_slice float_gather float_select
    }

    more_moves! { FloatTensor:
        float_transpose float_repeat_dim float_unfold float_slice_assign float_cat float_mask_where float_mask_fill
        float_scatter_add float_select_add
    }

    unary! { FloatTensor:
        float_detach float_recip float_neg float_sign float_exp float_log float_log1p float_sqrt float_abs float_cos
        float_sin float_tan float_cosh float_sinh float_tanh float_acos float_acosh float_asin float_asinh float_atan
        float_atanh float_round float_floor float_ceil float_trunc float_erf
        float_mean float_max float_min float_sum float_prod float_max_abs
    }

    scalar! { FloatTensor:
        float_add_scalar float_sub_scalar float_mul_scalar float_div_scalar float_remainder_scalar float_powi_scalar
        float_powf_scalar float_powf_scalar_impl float_clamp_min float_clamp_max
    }

    binary! { FloatTensor:
        float_add float_sub float_mul float_div float_remainder float_matmul float_powf float_atan2
    }

    compare! { FloatTensor:
        float_equal float_not_equal float_greater float_greater_equal float_lower float_lower_equal
    }

    compare_scalar! { FloatTensor:
        float_equal_elem float_not_equal_elem float_greater_elem float_greater_equal_elem float_lower_elem
        float_lower_equal_elem
    }

    convert! { FloatTensor -> BoolTensor BoolDType: float_any float_all float_is_nan float_is_inf }
    convert! { FloatTensor -> IntTensor IntDType: float_into_int }
    convert! { FloatTensor -> FloatTensor FloatDType: float_cast }

    along! { FloatTensor:
        float_max_dim float_min_dim float_sum_dim float_mean_dim float_prod_dim float_max_abs_dim
        float_cumsum float_cumprod float_cummin float_cummax
    }

    along_to! { FloatTensor -> BoolTensor BoolDType: float_any_dim float_all_dim }
    along_to! { FloatTensor -> IntTensor IntDType: float_argmax float_argmin }

    fills! { FloatTensor FloatDType: float_empty float_zeros float_ones }

    methods! {
        fn float_random(
            shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: FloatDType,
        ) -> FloatTensor<Self>;
        fn float_full(shape: Shape, value: Scalar, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_cross(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn float_powi(lhs: FloatTensor<Self>, rhs: IntTensor<Self>) -> FloatTensor<Self>;
        fn float_clamp(tensor: FloatTensor<Self>, min: Scalar, max: Scalar) -> FloatTensor<Self>;
        fn float_scatter_nd(
            data: FloatTensor<Self>, indices: IntTensor<Self>, values: FloatTensor<Self>, reduction: IndexingUpdateOp,
        ) -> FloatTensor<Self>;
        fn float_gather_nd(data: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self>;
        fn float_max_dim_with_indices(
            tensor: FloatTensor<Self>, dim: usize, indices_dtype: IntDType,
        ) -> (FloatTensor<Self>, IntTensor<Self>);
        fn float_min_dim_with_indices(
            tensor: FloatTensor<Self>, dim: usize, indices_dtype: IntDType,
        ) -> (FloatTensor<Self>, IntTensor<Self>);
        fn float_argtopk(tensor: FloatTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn float_sort(tensor: FloatTensor<Self>, dim: usize, descending: bool) -> FloatTensor<Self>;
        fn float_sort_with_indices(
            tensor: FloatTensor<Self>, dim: usize, descending: bool, indices_dtype: IntDType,
        ) -> (FloatTensor<Self>, IntTensor<Self>);
        fn float_argsort(
            tensor: FloatTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType,
        ) -> IntTensor<Self>;
        fn float_grid_sample_2d(
            tensor: FloatTensor<Self>, grid: FloatTensor<Self>, options: GridSampleOptions,
        ) -> FloatTensor<Self>;
    }
}

impl IntTensorOps<Self> for Probe {
    transfers! { IntTensor: int_from_data int_into_data int_device int_to_device }

    moves! { IntTensor:
        int_swap_dims int_permute int_flip int_reshape int_expand int_slice int_gather int_select
    }

    more_moves! { IntTensor:
        int_transpose int_repeat_dim int_unfold int_slice_assign int_cat int_mask_where int_mask_fill int_scatter_add
        int_select_add
    }

    unary! { IntTensor:
        int_abs int_neg int_sign bitwise_not
        int_mean int_max int_min int_sum int_prod int_max_abs
    }

    scalar! { IntTensor:
        int_add_scalar int_sub_scalar int_mul_scalar int_div_scalar int_remainder_scalar int_powi_scalar
        int_powi_scalar_impl int_clamp_min int_clamp_max bitwise_and_scalar bitwise_or_scalar bitwise_xor_scalar
        bitwise_left_shift_scalar bitwise_right_shift_scalar
    }

    binary! { IntTensor:
        int_add int_sub int_mul int_div int_remainder int_powi int_matmul bitwise_and bitwise_or bitwise_xor
        bitwise_left_shift bitwise_right_shift
    }

    compare! { IntTensor:
        int_equal int_not_equal int_greater int_greater_equal int_lower int_lower_equal
    }

    compare_scalar! { IntTensor:
        int_equal_elem int_not_equal_elem int_greater_elem int_greater_equal_elem int_lower_elem int_lower_equal_elem
    }

    convert! { IntTensor -> BoolTensor BoolDType: int_any int_all }
    convert! { IntTensor -> FloatTensor FloatDType: int_into_float }
    convert! { IntTensor -> IntTensor IntDType: int_cast }

    along! { IntTensor:
        int_max_dim int_min_dim int_sum_dim int_mean_dim int_prod_dim int_max_abs_dim
        int_cumsum int_cumprod int_cummin int_cummax int_argmax int_argmin
    }

    along_to! { IntTensor -> BoolTensor BoolDType: int_any_dim int_all_dim }

    fills! { IntTensor IntDType: int_empty int_zeros int_ones }

    methods! {
        fn int_random(
            shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: IntDType,
        ) -> IntTensor<Self>;
        fn int_full(shape: Shape, value: Scalar, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange(range: Range<i64>, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange_step(range: Range<i64>, step: usize, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_clamp(tensor: IntTensor<Self>, min: Scalar, max: Scalar) -> IntTensor<Self>;
        fn int_scatter_nd(
            data: IntTensor<Self>, indices: IntTensor<Self>, values: IntTensor<Self>, reduction: IndexingUpdateOp,
        ) -> IntTensor<Self>;
        fn int_gather_nd(data: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self>;
        fn int_max_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>);
        fn int_min_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>);
        fn int_argtopk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self>;
        fn int_sort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self>;
        fn int_sort_with_indices(
            tensor: IntTensor<Self>, dim: usize, descending: bool,
        ) -> (IntTensor<Self>, IntTensor<Self>);
        fn int_argsort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self>;
    }
}

impl BoolTensorOps<Self> for Probe {
    transfers! { BoolTensor: bool_from_data bool_into_data bool_device bool_to_device }

    moves! { BoolTensor:
        bool_swap_dims bool_permute bool_flip bool_reshape bool_expand bool_slice bool_gather bool_select
    }

    more_moves! { BoolTensor:
        bool_transpose bool_repeat_dim bool_unfold bool_slice_assign bool_cat bool_mask_where bool_mask_fill
        bool_scatter_or bool_select_or
    }

    unary! { BoolTensor: bool_not bool_any bool_all }
    scalar! { BoolTensor: bool_equal_elem bool_not_equal_elem }
    binary! { BoolTensor: bool_equal bool_not_equal bool_and bool_or bool_xor }
    convert! { BoolTensor -> IntTensor IntDType: bool_into_int }
    convert! { BoolTensor -> FloatTensor FloatDType: bool_into_float }
    along! { BoolTensor: bool_any_dim bool_all_dim }
    fills! { BoolTensor BoolDType: bool_empty bool_zeros bool_ones }

    async fn bool_argwhere(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> {
        let mut call = Call::new("bool_argwhere");
        let tensor = tensor.open(&mut call);
        call.run(|| read_sync(<Flex>::bool_argwhere(tensor, out_dtype)))
    }
}

impl QTensorOps<Self> for Probe {
    transfers! { QuantizedTensor: q_from_data q_into_data q_device q_to_device }

    moves! { QuantizedTensor:
        q_swap_dims q_permute q_flip q_reshape q_expand q_slice q_gather q_select
    }

    along_to! { QuantizedTensor -> IntTensor IntDType: q_argmax q_argmin }

    methods! {
        fn quantize(
            tensor: FloatTensor<Self>, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Self>,
        ) -> QuantizedTensor<Self>;
        fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self>;
        fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self>;
    }
}

impl ActivationOps<Self> for Probe {
    unary! { FloatTensor: relu gelu sigmoid log_sigmoid }
    binary! { FloatTensor: relu_backward gelu_backward sigmoid_backward log_sigmoid_backward prelu }
    scalar! { FloatTensor: leaky_relu }
    along! { FloatTensor: softmax }

    methods! {
        fn hard_sigmoid(tensor: FloatTensor<Self>, alpha: Scalar, beta: Scalar) -> FloatTensor<Self>;
    }
}

macro_rules! convolutions {
    ($options:ident: $($name:ident $num_dims:literal)*) => {
        methods! {$(
            fn $name(
                x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>,
                options: $options<$num_dims>,
            ) -> FloatTensor<Self>;
        )*}
    };
}

impl ModuleOps<Self> for Probe {
    convolutions! { ConvOptions: conv1d 1 conv2d 2 conv3d 3 }
    convolutions! { ConvTransposeOptions: conv_transpose1d 1 conv_transpose2d 2 conv_transpose3d 3 }
    binary! { FloatTensor: adaptive_avg_pool2d_backward }

    methods! {
        fn deform_conv2d(
            x: FloatTensor<Self>, offset: FloatTensor<Self>, weight: FloatTensor<Self>,
            mask: Option<FloatTensor<Self>>, bias: Option<FloatTensor<Self>>, options: DeformConvOptions<2>,
        ) -> FloatTensor<Self>;
        fn deform_conv2d_backward(
            x: FloatTensor<Self>, offset: FloatTensor<Self>, weight: FloatTensor<Self>,
            mask: Option<FloatTensor<Self>>, bias: Option<FloatTensor<Self>>, output_grad: FloatTensor<Self>,
            options: DeformConvOptions<2>,
        ) -> DeformConv2dBackward<Self>;
        fn avg_pool2d(
            x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            count_include_pad: bool, ceil_mode: bool,
        ) -> FloatTensor<Self>;
        fn avg_pool2d_backward(
            x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2],
            padding: [usize; 2], count_include_pad: bool, ceil_mode: bool,
        ) -> FloatTensor<Self>;
        fn adaptive_avg_pool2d(x: FloatTensor<Self>, output_size: [usize; 2]) -> FloatTensor<Self>;
        fn max_pool2d(
            x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            dilation: [usize; 2], ceil_mode: bool,
        ) -> FloatTensor<Self>;
        fn max_pool2d_with_indices(
            x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            dilation: [usize; 2], ceil_mode: bool,
        ) -> MaxPool2dWithIndices<Self>;
        fn max_pool2d_with_indices_backward(
            x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            dilation: [usize; 2], ceil_mode: bool, output_grad: FloatTensor<Self>, indices: IntTensor<Self>,
        ) -> MaxPool2dBackward<Self>;
        fn interpolate(
            x: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions,
        ) -> FloatTensor<Self>;
        fn interpolate_backward(
            x: FloatTensor<Self>, grad: FloatTensor<Self>, output_size: [usize; 2], options: InterpolateOptions,
        ) -> FloatTensor<Self>;
        fn attention(
            query: FloatTensor<Self>, key: FloatTensor<Self>, value: FloatTensor<Self>,
            mask: Option<BoolTensor<Self>>, attn_bias: Option<FloatTensor<Self>>, options: AttentionModuleOptions,
        ) -> FloatTensor<Self>;
        fn rfft(signal: FloatTensor<Self>, dim: usize, n: Option<usize>) -> (FloatTensor<Self>, FloatTensor<Self>);
        fn irfft(
            spectrum_re: FloatTensor<Self>, spectrum_im: FloatTensor<Self>, dim: usize, n: Option<usize>,
        ) -> FloatTensor<Self>;
        fn embedding(weights: FloatTensor<Self>, indices: IntTensor<Self>) -> FloatTensor<Self>;
        fn embedding_backward(
            weights: FloatTensor<Self>, output_grad: FloatTensor<Self>, indices: IntTensor<Self>,
        ) -> FloatTensor<Self>;
        fn layer_norm(
            tensor: FloatTensor<Self>, gamma: FloatTensor<Self>, beta: Option<FloatTensor<Self>>, epsilon: f64,
        ) -> FloatTensor<Self>;
    }
}
