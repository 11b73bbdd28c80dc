//! What is shared out, what stays whole, and which collectives that takes.

use bonfire::{Placement, Replica, ReplicaTensor, Spread, collectives::Collective, value::Float};
use burn::tensor::{Tensor, TensorPrimitive, activation::relu};
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
