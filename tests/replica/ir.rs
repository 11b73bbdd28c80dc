//! A replica behind Burn's intermediate representation: as handles, and inside another backend.

use bonfire::{Replica, ReplicaDevice, Spread};
use burn::{
    backend::Autodiff,
    tensor::{
        Bool, Int, Tensor, TensorData, TensorPrimitive,
        quantization::{QuantLevel, QuantScheme, QuantValue},
    },
};
use burn_backend::TensorMetadata;
use burn_flex::{Flex, FlexDevice};
use burn_ir::{BackendIr, HandleContainer, TensorHandle, TensorId, TensorIr, TensorStatus};
use burn_ndarray::NdArray;
use burn_router::{Router, duo::MultiDevice};

use super::{
    models::Cnn,
    runs::{ALWAYS, F32, assert_equal, draw_alone, floats, replica, train},
};

type B = Replica<Flex>;
type Handles = HandleContainer<<B as BackendIr>::Handle>;

/// A router holds at least two backends; the second is not used.
type Routed<Inner> = Router<(Inner, NdArray)>;

fn members() -> impl Iterator<Item = ReplicaDevice<Flex>> {
    (1..=3).flat_map(|num_members| [ALWAYS, Spread::Eager].map(|spread| replica(num_members, spread)))
}

/// What an interpreter is told about a tensor: it gives up its handle at the last use.
fn description(id: u64, tensor: &impl TensorMetadata, status: TensorStatus) -> TensorIr {
    TensorIr { id: TensorId::new(id), shape: tensor.shape(), status, dtype: tensor.dtype() }
}

#[test]
fn tensors_of_every_kind_come_back_from_their_handles_and_are_computed_with() {
    for device in members() {
        let mut handles = Handles::new();
        let x: Tensor<B, 2> = floats(1, [7, 4], &device);
        let weight: Tensor<B, 2> = floats(2, [4, 3], &device);
        // Shared out over the members, if there are several.
        let product = x.matmul(weight);
        let expected = product.clone().mul_scalar(2).into_data();
        let primitive = product.into_primitive().tensor();
        let float = description(0, &primitive, TensorStatus::ReadOnly);
        handles.register_float_tensor::<B>(&float.id, primitive);

        let primitive = Tensor::<B, 1, Int>::arange(0..7, &device).into_primitive();
        let int = description(1, &primitive, TensorStatus::ReadWrite);
        handles.register_int_tensor::<B>(&int.id, primitive);

        let primitive = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(handles.get_float_tensor::<B>(&float)))
            .greater_elem(0)
            .into_primitive();
        let bool = description(2, &primitive, TensorStatus::ReadWrite);
        handles.register_bool_tensor::<B>(&bool.id, primitive);

        for _ in 0..2 {
            let again = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(handles.get_float_tensor::<B>(&float)));
            assert_eq!(again.mul_scalar(2).into_data(), expected, "{device:?}");
        }
        let again = Tensor::<B, 1, Int>::from_primitive(handles.get_int_tensor::<B>(&int));
        assert_eq!((again * 3).sum().into_scalar(), 63, "{device:?}");
        let again = Tensor::<B, 2, Bool>::from_primitive(handles.get_bool_tensor::<B>(&bool));
        let positive = expected.iter::<f32>().map(|value| value > 0.0).collect::<Vec<_>>();
        assert_eq!(again.into_data().iter::<bool>().collect::<Vec<_>>(), positive, "{device:?}");
        assert_eq!(handles.num_handles(), 1, "the float tensor alone was only read");
    }
}

#[test]
fn a_quantized_tensor_comes_back_from_its_handle() {
    let scheme = QuantScheme::default().with_value(QuantValue::Q8S).with_level(QuantLevel::Tensor);
    for device in members() {
        let mut handles = Handles::new();
        let quantized = floats::<B, 2>(3, [4, 8], &device).quantize_dynamic(&scheme);
        let expected: TensorData = quantized.clone().dequantize().into_data();
        let TensorPrimitive::QFloat(primitive) = quantized.into_primitive() else { panic!("a quantized tensor") };
        let ir = description(0, &primitive, TensorStatus::ReadWrite);
        handles.register_quantized_tensor::<B>(&ir.id, primitive);
        let primitive = handles.get_quantized_tensor::<B>(&ir);
        assert_eq!(primitive.dtype(), ir.dtype);
        let again = Tensor::<B, 2>::from_primitive(TensorPrimitive::QFloat(primitive));
        assert_eq!(again.dequantize().into_data(), expected, "{device:?}");
        assert_eq!(handles.num_handles(), 0);
    }
}

#[test]
#[should_panic(expected = "a handle of kind float was used as one of kind int")]
fn a_handle_of_another_kind_is_refused() {
    let device = replica::<Flex>(2, ALWAYS);
    let primitive = floats::<B, 1>(4, [3], &device).into_primitive().tensor();
    let shape = primitive.shape();
    B::int_tensor(TensorHandle { handle: B::float_tensor_handle(primitive), shape });
}

/// Burn's interpreter of the intermediate representation, the one its servers run, over a replica beside one over Flex.
#[test]
fn a_replica_inside_a_router_trains_as_a_plain_device_inside_one() {
    let _alone = draw_alone();
    let plain = train::<Autodiff<Routed<Flex>>, Cnn<_>>(&MultiDevice::B1(FlexDevice), 7, 5);
    for device in members() {
        let context = format!("{device:?}, spread {:?}", device.options().spread);
        let run = train::<Autodiff<Routed<B>>, Cnn<_>>(&MultiDevice::B1(device.clone()), 7, 5);
        assert_equal(&run, &plain, F32, &context);
        let num_calls = device.collectives().tally().total_calls();
        assert!(num_calls > 0 || device.num_members() == 1, "{context}: nothing was shared out");
    }
}
