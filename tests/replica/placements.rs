//! What is shared out, what stays whole, and which collectives that takes.

use bonfire::{Placement, Replica, ReplicaDevice, ReplicaTensor, Spread, collectives::Collective, value::Float};
use burn::{
    backend::Autodiff,
    tensor::{Int, Tensor, TensorData, TensorPrimitive, activation::relu},
};
use burn_flex::Flex;

use super::runs::{ALWAYS, replica};

type B = Replica<Flex>;

fn placement<const D: usize>(tensor: &Tensor<B, D>) -> Placement {
    let TensorPrimitive::Float(primitive) = tensor.clone().into_primitive() else { panic!("not quantized") };
    let primitive: ReplicaTensor<Flex, Float> = primitive;
    primitive.placement().clone()
}

#[test]
fn a_fresh_tensor_stays_at_home_until_an_operation_is_worth_sharing() {
    let device = replica::<Flex>(2, Spread::OnHeavyOp { min_work: 1000 });
    let small = Tensor::<B, 2>::ones([4, 8], &device).matmul(Tensor::ones([8, 4], &device));
    assert_eq!(placement(&small), Placement::Local);
    assert_eq!(placement(&(small + 1.0)), Placement::Local);
    let large = Tensor::<B, 2>::ones([40, 8], &device).matmul(Tensor::ones([8, 40], &device));
    assert_eq!(placement(&large), Placement::shard(0, [20, 20]));
}

#[test]
fn forward_over_a_batch_needs_no_collective() {
    let device = replica::<Flex>(3, ALWAYS);
    let before = device.collectives().tally();
    let x = Tensor::<B, 2>::ones([7, 5], &device);
    let hidden = relu(x.matmul(Tensor::ones([5, 6], &device)) + Tensor::<B, 1>::ones([6], &device).unsqueeze());
    let output = hidden.matmul(Tensor::ones([6, 2], &device));
    assert_eq!(placement(&output), Placement::shard(0, [3, 2, 2]));
    assert_eq!(output.to_data().shape.to_vec(), vec![7, 2]);
    assert_eq!((device.collectives().tally() - before).to_string(), "nothing");
}

#[test]
fn a_loss_is_reduced_once_and_only_when_it_is_read() {
    let device = replica::<Flex>(2, ALWAYS);
    let x = Tensor::<B, 2>::ones([8, 4], &device).matmul(Tensor::ones([4, 4], &device));
    let before = device.collectives().tally();
    let loss = x.mean();
    assert!(matches!(placement(&loss), Placement::Partial { .. }));
    <B as burn::tensor::backend::Backend>::sync(&device).unwrap();
    assert_eq!((device.collectives().tally() - before).to_string(), "nothing");
    assert_eq!(loss.clone().into_scalar(), 4.0);
    assert_eq!(loss.into_scalar(), 4.0);
    let collectives = device.collectives().tally() - before;
    assert_eq!(collectives.num_calls(Collective::AllReduce), 1, "{collectives}");
    assert_eq!(collectives.num_bytes(Collective::AllReduce), 4, "{collectives}");
}

#[test]
fn a_sum_that_is_repeated_is_formed_at_its_own_size() {
    let device = replica::<Flex>(2, ALWAYS);
    let x = Tensor::<B, 2>::ones([8, 4], &device).matmul(Tensor::ones([4, 3], &device));
    let repeated = x.clone().sum_dim(0).expand([8, 3]);
    let reordered = repeated.clone().reshape([2, 4, 3]).swap_dims(0, 2);
    assert!(matches!(placement(&repeated), Placement::Partial { .. }));
    let before = device.collectives().tally();
    assert_eq!((reordered + 1.0).into_data().to_vec::<f32>().unwrap(), vec![33.0; 24]);
    assert_eq!((repeated + x).into_data().to_vec::<f32>().unwrap(), vec![36.0; 24]);
    let collectives = device.collectives().tally() - before;
    // Two views, each read once.
    assert_eq!(collectives.total_calls(), 2, "{collectives}");
    assert_eq!(collectives.num_bytes(Collective::AllReduce), 2 * 3 * 4, "{collectives}");
}

/// What a backward pass is full of: ones of the activation's shape, times a small gradient.
#[test]
fn values_that_repeat_are_those_of_the_repeated_tensor() {
    let device = replica::<Flex>(3, ALWAYS);
    let x = Tensor::<B, 2>::ones([7, 5], &device).matmul(Tensor::ones([5, 6], &device));
    let gradient = x.clone().sum_dim(0) * Tensor::<B, 2>::from_data([[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]], &device);
    let repeated = Tensor::<B, 2>::ones([7, 6], &device).mul_scalar(0.5) * gradient.clone();
    let before = device.collectives().tally();
    for (found, expected) in [
        (repeated.clone(), 17.5),
        (repeated.clone().reshape([7, 2, 3]).swap_dims(0, 1).swap_dims(0, 1).reshape([7, 6]), 17.5),
        (repeated.clone().transpose().transpose().neg().neg(), 17.5),
        (repeated.clone() + x.clone() - x.clone(), 17.5),
        (repeated.clone().slice([0..7, 0..6]).flip([0]), 17.5),
        (Tensor::cat(vec![repeated.clone(), repeated.clone()], 0).narrow(0, 3, 7), 17.5),
        (repeated.clone().sum_dim(0).div_scalar(7.0).expand([7, 6]), 17.5),
    ] {
        let values = found.into_data().to_vec::<f32>().unwrap();
        let row: Vec<f32> = (1..=6).map(|column| expected * column as f32).collect();
        assert_eq!(values, row.repeat(7));
    }
    let product = x.transpose().matmul(repeated).into_data().to_vec::<f32>().unwrap();
    assert_eq!(product[..3], [612.5, 1225.0, 1837.5]);
    let collectives = device.collectives().tally() - before;
    assert_eq!(collectives.total_calls(), collectives.num_calls(Collective::AllReduce), "{collectives}");
}

/// A row that repeats to as many elements as the buffer it was cut from has.
#[test]
fn a_repeated_view_is_no_whole_buffer() {
    let device = replica::<Flex>(2, ALWAYS);
    let w = Tensor::<B, 2>::from_data([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &device);
    let one = Tensor::<B, 2>::ones([1, 1], &device);
    // Whole on every member, as a parameter is after a step.
    let w = (w.clone().matmul(Tensor::ones([3, 1], &device)).sum() * 0.0 + one.sum()).unsqueeze::<2>() * w;
    let repeated = w.clone().slice([0..1, 0..3]).expand([2, 3]);
    assert_eq!(repeated.clone().reshape([2, 3, 1]).sum().into_scalar(), 12.0);
    assert_eq!(repeated.clone().sum_dim(0).into_data().to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    drop(w);
    assert_eq!((repeated * 2.0).into_data().to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 2.0, 4.0, 6.0]);
}

/// NdArray does not broadcast in every operation.
#[test]
fn inputs_of_one_shape_reach_a_member_in_one_shape_however_they_are_stored() {
    use burn::tensor::{TensorData, backend::Backend};
    use burn_ndarray::{NdArray, NdArrayDevice};

    fn run<B: Backend>(device: &B::Device) -> Vec<TensorData> {
        let x = Tensor::<B, 2>::from_data([[0.5f64, -1.0], [2.0, -3.0], [1.5, 0.25]], device);
        let row = x.matmul(Tensor::from_data([[1.0f64, 2.0], [3.0, -4.0]], device)).sum_dim(0);
        let (ones, repeated) = (Tensor::<B, 2>::ones([40, 2], device), Tensor::ones([40, 2], device) * row.clone());
        let mask = repeated.clone().lower_elem(0.0);
        vec![
            ones.clone().mask_fill(mask.clone(), 7.0).into_data(),
            ones.clone().mask_where(mask.clone(), repeated.clone()).into_data(),
            repeated.clone().mask_where(mask, ones.clone() * 2.0).into_data(),
            (ones.clone() * 5.0 % repeated.clone()).into_data(),
            (ones * 2.0).powf(repeated.clone()).into_data(),
            (repeated.clone() - row).into_data(),
            burn::tensor::activation::relu(repeated).into_data(),
        ]
    }
    let device = replica::<NdArray<f64>>(2, ALWAYS);
    assert_eq!(run::<Replica<NdArray<f64>>>(&device), run::<NdArray<f64>>(&NdArrayDevice::Cpu));
}

#[test]
fn members_get_the_shares_they_were_given() {
    use bonfire::{ReplicaDevice, ReplicaOptions, Shares};
    use burn_flex::FlexDevice;

    let options = ReplicaOptions { shares: Shares::Weighted(vec![2, 3, 3]), spread: ALWAYS, ..Default::default() };
    let device = ReplicaDevice::<Flex>::with_options(vec![FlexDevice; 3], options).unwrap();
    let y = Tensor::<B, 2>::ones([64, 4], &device).matmul(Tensor::ones([4, 4], &device));
    assert_eq!(placement(&y), Placement::shard(0, [16, 24, 24]));
    assert_eq!(y.sum().into_scalar(), 64.0 * 16.0);
}

#[test]
fn a_dim_of_length_one_is_never_shared() {
    let device = replica::<Flex>(2, Spread::Eager);
    let row = Tensor::<B, 2>::from_data([[1.0f32, 2.0, 3.0]], &device);
    assert_eq!(placement(&row), Placement::Replicate);
    let product = row.clone().matmul(Tensor::from_data([[1.0f32], [1.0], [1.0]], &device));
    assert_eq!(product.into_scalar(), 6.0);
}

/// Where the gradient of `x` lies, with what it took to make it there.
fn gradient_of(
    device: &ReplicaDevice<Flex>,
    loss: impl Fn(Tensor<Autodiff<B>, 2>) -> Tensor<Autodiff<B>, 1>,
) -> (Placement, String) {
    // Five sequences of 100 tokens: 300 and 200 rows, which nobody would guess from 500.
    let x = Tensor::<Autodiff<B>, 3>::ones([5, 100, 4], device).matmul(Tensor::ones([1, 4, 4], device));
    let x = x.reshape([500, 4]).detach().require_grad();
    assert_eq!(placement(&x.clone().inner()), Placement::shard(0, [300, 200]));
    let loss = loss(x.clone());
    let before = device.collectives().tally();
    let grad = x.grad(&loss.backward()).unwrap();
    <B as burn::tensor::backend::Backend>::sync(device).unwrap();
    (placement(&grad), (device.collectives().tally() - before).to_string())
}

#[test]
fn the_gradient_of_what_was_picked_or_cut_is_shared_as_that_was() {
    let device = replica::<Flex>(2, ALWAYS);
    let labels =
        Tensor::<Autodiff<B>, 1, Int>::from_data(TensorData::from([1i64, 3, 0, 2].repeat(125).as_slice()), &device);
    let shared = (Placement::shard(0, [300, 200]), "nothing".to_string());
    let of_labels = |x: Tensor<Autodiff<B>, 2>| x.gather(1, labels.clone().reshape([500, 1])).mean();
    assert_eq!(gradient_of(&device, of_labels), shared);
    assert_eq!(gradient_of(&device, |x| x.slice_dim(0, 100..450).sum()), shared);
    assert_eq!(gradient_of(&device, |x| (x.clone() * x).slice_dim(0, 100..450).sum()), shared);
}

/// A tensor of a shape that was shared once, but is at home now, has its gradient at home.
#[test]
fn what_is_cut_at_home_has_its_gradient_at_home_though_its_shape_was_shared_before() {
    let device = replica::<Flex>(2, ALWAYS);
    gradient_of(&device, |x| x.slice_dim(0, 100..450).sum());
    let x = Tensor::<Autodiff<B>, 2>::from_data(TensorData::from([[1.0f32; 4]; 500]), &device).require_grad();
    let grad = x.grad(&x.clone().slice_dim(0, 100..450).sum().backward()).unwrap();
    assert_eq!(placement(&grad), Placement::Local);
    assert_eq!(grad.sum().into_scalar(), 350.0 * 4.0);
}
