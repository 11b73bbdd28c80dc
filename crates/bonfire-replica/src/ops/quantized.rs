//! Quantized tensors are never shared out: their scales belong to blocks of the whole.

use burn_backend::{
    ExecutionError, FloatDType, Shape, Slice, TensorData, TensorMetadata,
    ops::QTensorOps,
    quantization::{QuantScheme, QuantizationParametersPrimitive},
    tensor::{Device, FloatTensor, IntTensor, QuantizedTensor},
};

use super::*;
use crate::{Member, Replica, ReplicaTensor, read::into_data, transfer::to_device};

impl<B: Member> QTensorOps<Self> for Replica<B> {
    fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self> {
        ReplicaTensor::fresh(B::q_from_data(data, device.group.home()), device)
    }

    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let scheme = *scheme;
        // The inner backend may store another scheme than the one asked for.
        apply(
            Call::light("quantize"),
            (tensor, qparams.scales),
            |_| (whole(), Spec::Unknown),
            move |(x, scales), _| B::quantize(x, &scheme, QuantizationParametersPrimitive { scales }),
        )
    }

    fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self> {
        let scheme = *scheme;
        apply(
            Call::light("quantize_dynamic"),
            (tensor,),
            |_| (whole(), Spec::Unknown),
            move |(x,), _| B::quantize_dynamic(x, &scheme),
        )
    }

    fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let spec = Spec::new(tensor.shape(), dtype);
        apply(Call::light("dequantize"), (tensor,), |_| (whole(), spec), move |(x,), _| B::dequantize(x, dtype))
    }

    fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self> {
        tensor.device()
    }

    fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self> {
        to_device(tensor, device, B::q_from_data)
    }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        into_data(tensor).await
    }

    fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self> {
        let spec = Spec::new(shape.clone(), tensor.dtype());
        apply(Call::light("q_reshape"), (tensor,), |_| (whole(), spec), move |(x,), _| B::q_reshape(x, shape.clone()))
    }

    fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self> {
        let spec = Spec::inferred(tensor.shape().expand(shape.clone()), tensor.dtype());
        apply(Call::light("q_expand"), (tensor,), |_| (whole(), spec), move |(x,), _| B::q_expand(x, shape.clone()))
    }

    fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self> {
        apply(
            Call::light("q_swap_dims"),
            (tensor,),
            |_| (whole(), Spec::Unknown),
            move |(x,), _| B::q_swap_dims(x, dim1, dim2),
        )
    }

    fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self> {
        let axes = axes.to_vec();
        apply(Call::light("q_permute"), (tensor,), |_| (whole(), Spec::Unknown), move |(x,), _| B::q_permute(x, &axes))
    }

    fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self> {
        let axes = axes.to_vec();
        apply(Call::light("q_flip"), (tensor,), |_| (whole(), Spec::Unknown), move |(x,), _| B::q_flip(x, &axes))
    }

    fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self> {
        apply(
            Call::light("q_select"),
            (tensor, indices),
            |_| (whole(), Spec::Unknown),
            move |(x, i), _| B::q_select(x, dim, i),
        )
    }

    fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self> {
        apply(
            Call::light("q_gather"),
            (tensor, indices),
            |_| (whole(), Spec::Unknown),
            move |(x, i), _| B::q_gather(dim, x, i),
        )
    }

    fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self> {
        let slices = slices.to_vec();
        apply(Call::light("q_slice"), (tensor,), |_| (whole(), Spec::Unknown), move |(x,), _| B::q_slice(x, &slices))
    }

    fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: burn_backend::IntDType) -> IntTensor<Self> {
        let spec = Spec::inferred(with_length(tensor.shape(), dim, 1), out_dtype);
        apply(Call::light("q_argmax"), (tensor,), |_| (whole(), spec), move |(x,), _| B::q_argmax(x, dim, out_dtype))
    }

    fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: burn_backend::IntDType) -> IntTensor<Self> {
        let spec = Spec::inferred(with_length(tensor.shape(), dim, 1), out_dtype);
        apply(Call::light("q_argmin"), (tensor,), |_| (whole(), spec), move |(x,), _| B::q_argmin(x, dim, out_dtype))
    }
}
