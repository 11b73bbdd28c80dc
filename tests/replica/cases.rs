//! Faults that users met in other trainers, each with its right value.

use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Shares, Spread};
use burn::{
    backend::Autodiff,
    data::{
        dataloader::{DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    grad_clipping::GradientClippingConfig,
    module::{Module, Param},
    nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig},
    optim::{GradientsAccumulator, GradientsParams, Optimizer, SgdConfig},
    tensor::{
        DType, Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_flex::{Flex, FlexDevice};

use super::{
    programs::{Program, same_as_one_device},
    runs::{ALWAYS, draw_alone, floats, replica},
};

type Ad = Autodiff<Replica<Flex>>;

fn assert_close(found: TensorData, expected: &[f64], tolerance: f64) {
    let found: Vec<f64> = found.iter::<f64>().collect();
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (ours, right) in found.iter().zip(expected) {
        assert!((ours - right).abs() <= tolerance, "{found:?}, right is {expected:?}");
    }
}

/// Output, running mean and running variance of a fresh BatchNorm over one feature.
fn batch_norm(values: &[f32], num_members: usize, spread: Spread) -> [TensorData; 3] {
    batch_norm_on(values, replica::<Flex>(num_members, spread))
}

fn batch_norm_on(values: &[f32], device: ReplicaDevice<Flex>) -> [TensorData; 3] {
    let norm: BatchNorm<Ad> = BatchNormConfig::new(1).init(&device);
    let x = Tensor::<Ad, 2>::from_data(TensorData::new(values.to_vec(), [values.len(), 1]), &device);
    let output = norm.forward(x);
    [output.into_data(), norm.running_mean.value_sync().into_data(), norm.running_var.value_sync().into_data()]
}

/// CASES 12: the mean over members that have 3 items and 1, and the biased variance, move the running ones by a tenth.
#[test]
fn batch_norm_counts_items_not_members() {
    for spread in [ALWAYS, Spread::Eager] {
        let options = ReplicaOptions { shares: Shares::Weighted(vec![3, 1]), spread, ..Default::default() };
        let device = ReplicaDevice::with_options(vec![FlexDevice; 2], options).unwrap();
        let [output, mean, variance] = batch_norm_on(&[1.0, 2.0, 3.0, 10.0], device);
        let deviation = (12.5f64 + 1e-5).sqrt();
        assert_close(output, &[-3.0, -2.0, -1.0, 6.0].map(|distance| distance / deviation), 1e-5);
        assert_close(mean, &[0.1 * 4.0], 1e-6);
        assert_close(variance, &[0.9 + 0.1 * 12.5], 1e-5);
    }
}

/// CASES 43.
#[test]
fn batch_norm_uses_the_statistics_of_the_whole_batch_not_of_a_member() {
    for num_members in 1..=4 {
        for spread in [ALWAYS, Spread::Eager] {
            let [output, mean, variance] = batch_norm(&[1.0, 2.0, 6.0], num_members, spread);
            assert_close(output, &[-0.925_82, -0.462_91, 1.388_73], 1e-4);
            assert_close(mean, &[0.3], 1e-6);
            assert_close(variance, &[1.366_67], 1e-5);
        }
    }
}

/// CASES 44.
#[test]
fn batch_norm_of_one_item_over_two_members_has_no_nan() {
    for spread in [ALWAYS, Spread::Eager] {
        let [output, mean, variance] = batch_norm(&[5.0], 2, spread);
        assert_close(output, &[0.0], 1e-6);
        assert_close(mean, &[0.5], 1e-6);
        assert_close(variance, &[0.9], 1e-6);
    }
}

/// CASES 45.
#[test]
fn a_mean_over_unequal_parts_is_not_the_mean_of_their_means() {
    let device = replica::<Flex>(2, Spread::Eager);
    let x = Tensor::<Replica<Flex>, 1>::from_data([1.0f32, 2.0, 3.0, 4.0, 5.0], &device);
    assert_close(x.clone().mean().into_data(), &[3.0], 0.0);
    assert_close(x.mean_dim(0).into_data(), &[3.0], 0.0);
}

/// A batch of numbers, as a loader makes it.
#[derive(Clone)]
struct ToTensor;

impl<B: Backend> Batcher<B, f32, Tensor<B, 2>> for ToTensor {
    fn batch(&self, items: Vec<f32>, device: &B::Device) -> Tensor<B, 2> {
        let num_items = items.len();
        Tensor::from_data(TensorData::new(items, [num_items, 1]), device)
    }
}

/// CASES 46.
#[test]
fn an_epoch_of_one_item_over_two_members_ends_after_one_update() {
    for spread in [ALWAYS, Spread::Eager] {
        let device = replica::<Flex>(2, spread);
        let mut model: Linear<Ad> = LinearConfig::new(1, 1).with_bias(false).init(&device);
        model.weight = Param::from_data([[1.0f32]], &device);
        let mut optimizer = SgdConfig::new().init();
        let loader = DataLoaderBuilder::<Ad, _, _>::new(ToTensor)
            .batch_size(4)
            .set_device(device.clone())
            .build(InMemDataset::new(vec![2.0f32]));
        let mut num_updates = 0;
        for x in loader.iter() {
            // y = wx against 3x: the gradient at w = 1, x = 2 is 2 (w - 3) x^2 = -16.
            let loss = (model.forward(x.clone()) - x * 3.0).square().mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.125, model, grads);
            num_updates += 1;
        }
        assert_eq!(num_updates, 1);
        assert_close(model.weight.val().into_data(), &[3.0], 0.0);
    }
}

/// CASES 48, each against one device.
mod the_batch_is_not_what_it_seems {
    use super::*;

    /// Sequence first: dim 0 is time, the batch is dim 1.
    struct BatchInDim1;

    impl Program for BatchInDim1 {
        fn run<B: Backend>(device: &B::Device) -> Vec<TensorData> {
            let x = floats::<B, 3>(1, [5, 3, 4], device);
            let w = floats::<B, 3>(2, [1, 4, 6], device);
            let y = x.clone().matmul(w);
            let per_item = y.clone().mean_dim(0).swap_dims(0, 1);
            let centred = y - per_item.clone().swap_dims(0, 1);
            vec![per_item.into_data(), centred.sum_dim(1).into_data(), x.flip([0]).into_data()]
        }
    }

    #[test]
    fn a_batch_in_dim_1() {
        same_as_one_device::<BatchInDim1>(1e-5);
    }

    /// Every length is the number of members, so that a wrong dim would go unnoticed by shapes.
    struct AllLengthsTwo;

    impl Program for AllLengthsTwo {
        fn run<B: Backend>(device: &B::Device) -> Vec<TensorData> {
            let x = floats::<B, 2>(1, [2, 2], device);
            let w = floats::<B, 2>(2, [2, 2], device);
            let y = x.clone().matmul(w.clone());
            let z = y.clone().transpose().matmul(x) + w;
            vec![y.into_data(), z.clone().into_data(), z.sum_dim(0).into_data()]
        }
    }

    #[test]
    fn batch_features_and_members_of_one_length() {
        same_as_one_device::<AllLengthsTwo>(1e-5);
    }

    /// Two batches of different length meet in one loss.
    struct TwoBatchSizes;

    impl Program for TwoBatchSizes {
        fn run<B: Backend>(device: &B::Device) -> Vec<TensorData> {
            let w = floats::<B, 2>(3, [4, 3], device);
            let few = floats::<B, 2>(1, [100, 4], device).matmul(w.clone());
            let many = floats::<B, 2>(2, [5_000, 4], device).matmul(w);
            let distance = few.clone().unsqueeze_dim::<3>(1) - many.clone().narrow(0, 0, 50).unsqueeze_dim::<3>(0);
            let loss = few.clone().square().mean() + many.clone().square().mean();
            let joined = Tensor::cat(vec![few, many], 0);
            vec![
                loss.into_data(),
                distance.abs().sum_dim(2).into_data(),
                joined.clone().mean_dim(0).into_data(),
                joined.max_dim(1).into_data(),
            ]
        }
    }

    #[test]
    fn two_batch_sizes_in_one_graph() {
        same_as_one_device::<TwoBatchSizes>(1e-4);
    }

    /// The batch on both sides of a product.
    struct GramMatrix;

    impl Program for GramMatrix {
        fn run<B: Backend>(device: &B::Device) -> Vec<TensorData> {
            let x = floats::<B, 2>(1, [7, 5], device);
            let gram = x.clone().matmul(x.clone().transpose());
            let weights = burn::tensor::activation::softmax(gram.clone(), 1);
            vec![gram.into_data(), weights.matmul(x).into_data()]
        }
    }

    #[test]
    fn a_product_of_the_batch_with_itself() {
        same_as_one_device::<GramMatrix>(1e-5);
    }

    /// Nothing in a dim.
    struct SizeZero;

    impl Program for SizeZero {
        fn run<B: Backend>(device: &B::Device) -> Vec<TensorData> {
            let x = floats::<B, 2>(1, [5, 4], device);
            let empty = Tensor::<B, 2>::zeros([0, 4], device);
            let y = x.matmul(floats::<B, 2>(2, [4, 3], device));
            let joined = Tensor::cat(vec![empty.clone(), floats::<B, 2>(3, [3, 4], device)], 0);
            vec![y.into_data(), (empty * 2.0).into_data(), joined.into_data()]
        }
    }

    #[test]
    fn tensors_of_size_zero() {
        same_as_one_device::<SizeZero>(1e-5);
    }

    /// A parameter of size 0 in a model that trains.
    #[derive(Module, Debug)]
    struct WithEmptyParameter<B: Backend> {
        linear: Linear<B>,
        empty: Param<Tensor<B, 1>>,
    }

    fn steps<B: AutodiffBackend>(device: &B::Device) -> Vec<f64> {
        let mut model = WithEmptyParameter::<B> {
            linear: LinearConfig::new(4, 2).with_bias(false).init(device),
            empty: Param::from_tensor(Tensor::zeros([0], device)),
        };
        model.linear.weight = Param::from_tensor(floats::<B, 2>(5, [4, 2], device));
        let mut optimizer = SgdConfig::new().init();
        for step in 0..3 {
            let y = model.linear.forward(floats::<B, 2>(step, [6, 4], device));
            let loss = y.square().mean() + (model.empty.val() * 2.0).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model, grads);
        }
        assert_eq!(model.empty.val().dims(), [0]);
        model.linear.weight.val().into_data().iter::<f64>().collect()
    }

    #[test]
    fn a_parameter_of_size_zero() {
        let expected = steps::<Autodiff<Flex>>(&FlexDevice);
        for num_members in 1..=4 {
            for spread in [ALWAYS, Spread::Eager] {
                let found = steps::<Ad>(&replica(num_members, spread));
                for (ours, theirs) in found.iter().zip(&expected) {
                    assert!((ours - theirs).abs() < 1e-6, "{num_members} members, {spread:?}: {ours}, not {theirs}");
                }
            }
        }
    }
}

/// CASES 24: one replica draws what one device draws.
#[test]
fn a_dropout_mask_is_that_of_one_device() {
    let _alone = draw_alone();
    fn mask<B: AutodiffBackend>(device: &B::Device, shape: [usize; 2]) -> TensorData {
        B::seed(device, 21);
        let dropout: Dropout = DropoutConfig::new(0.5).init();
        let ones = Tensor::<B, 2>::ones(shape, device).require_grad();
        let spread = ones.matmul(Tensor::ones([shape[1], shape[1]], device));
        dropout.forward(spread).inner().into_data()
    }
    for shape in [[64, 8], [7, 3], [1, 1000]] {
        let expected = mask::<Autodiff<Flex>>(&FlexDevice, shape);
        assert!(expected.iter::<f32>().any(|x| x == 0.0) && expected.iter::<f32>().any(|x| x != 0.0));
        for num_members in 1..=4 {
            for spread in [ALWAYS, Spread::Eager] {
                assert_eq!(mask::<Ad>(&replica(num_members, spread), shape), expected, "{num_members} members");
            }
        }
    }
}

/// CASES 11, here for a loss over fewer items than members.
#[test]
fn members_without_items_do_not_make_a_loss_nan() {
    let device = replica::<Flex>(4, Spread::Eager);
    let x = Tensor::<Replica<Flex>, 2>::from_data([[1.0f32, 5.0], [2.0, 3.0], [9.0, 7.0]], &device);
    assert_close(x.clone().mean().into_data(), &[4.5], 1e-6);
    assert_close(x.clone().max_dim(0).into_data(), &[9.0, 7.0], 0.0);
    assert_close(x.clone().min().into_data(), &[1.0], 0.0);
    let indices = Tensor::<Replica<Flex>, 1, Int>::from_data([2, 0], &device);
    assert_close(x.select(0, indices).into_data(), &[9.0, 7.0, 1.0, 5.0], 0.0);
}

/// What SGD at rate 1 adds to a weight `[features]` that starts at 0 when the loss is the mean of `x w` over the items, so
/// that an item's gradient is its `x`. One entry of `windows` per step, one of its batches per micro step.
fn updates<const F: usize>(
    windows: &[Vec<Vec<[f32; F]>>],
    clipping: Option<GradientClippingConfig>,
    num_members: usize,
    spread: Spread,
) -> Vec<f64> {
    let device = replica::<Flex>(num_members, spread);
    let mut model: Linear<Ad> = LinearConfig::new(F, 1).with_bias(false).init(&device);
    model.weight = Param::from_tensor(Tensor::zeros([F, 1], &device));
    let mut optimizer = SgdConfig::new().with_gradient_clipping(clipping).init();
    for window in windows {
        let mut accumulator = GradientsAccumulator::new();
        for items in window {
            let x = TensorData::new(items.concat(), [items.len(), F]);
            let loss = model.forward(Tensor::<Ad, 2>::from_data(x, &device)).mean() / window.len() as f32;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            accumulator.accumulate(&model, grads);
        }
        model = optimizer.step(1.0, model, accumulator.grads());
    }
    model.weight.val().into_data().iter::<f64>().collect()
}

fn assert_updates<const F: usize>(
    windows: &[Vec<Vec<[f32; F]>>],
    clipping: Option<GradientClippingConfig>,
    expected: [f64; F],
) {
    for num_members in 1..=4 {
        for spread in [ALWAYS, Spread::Eager] {
            let found = updates(windows, clipping.clone(), num_members, spread);
            for (ours, right) in found.iter().zip(&expected) {
                assert!((ours - right).abs() < 1e-5, "{num_members} members, {spread:?}: {found:?}, not {expected:?}");
            }
        }
    }
}

/// CASES 3.
#[test]
fn unequal_parts_give_the_gradient_of_the_whole_batch() {
    for shares in [Shares::Weighted(vec![5, 3]), Shares::Equal, Shares::First(1)] {
        let options = ReplicaOptions { shares, spread: ALWAYS, ..Default::default() };
        let device = ReplicaDevice::<Flex>::with_options([FlexDevice, FlexDevice], options).unwrap();
        let mut model: Linear<Ad> = LinearConfig::new(1, 1).with_bias(false).init(&device);
        model.weight = Param::from_tensor(Tensor::zeros([1, 1], &device));
        let x = Tensor::<Ad, 1>::from_data([1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &device).reshape([8, 1]);
        let loss = (model.forward(x.clone()) - x * 2.0).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        assert_close(grads.get::<Replica<Flex>, 2>(model.weight.id).unwrap().into_data(), &[-102.0], 1e-4);
        let model = SgdConfig::new().init().step(0.02, model, grads);
        assert_close(model.weight.val().into_data(), &[2.04], 1e-5);
    }
}

/// CASES 5: ten micro batches in windows of 4, 4 and 2, each the true mean of its window.
#[test]
fn the_tail_of_an_accumulation_window_is_neither_dropped_nor_mis_scaled() {
    let batch = |value: f32| vec![[value], [value + 2.0], [value - 2.0]];
    let windows: Vec<Vec<Vec<[f32; 1]>>> = [0..4, 4..8, 8..10].map(|w| w.map(|i| batch(i as f32)).collect()).to_vec();
    assert_updates(&windows, None, [-(1.5 + 5.5 + 8.5)]);
}

/// CASES 22, without a loss scale: clipped after the average.
#[test]
fn clipping_by_norm_sees_the_averaged_gradient() {
    let clip = Some(GradientClippingConfig::Norm(1.0));
    assert_updates(&[vec![vec![[3.0, 4.0], [0.0, 0.0]]]], clip, [-0.6, -0.8]);
}

/// CASES 37: the mean over all items, not a sum over members.
#[test]
fn gradients_are_averaged_not_summed_over_members() {
    assert_updates(&[vec![vec![[1.0], [1.0]]]], None, [-1.0]);
}

/// CASES 42.
#[test]
fn clipping_by_value_sees_the_averaged_gradient() {
    assert_updates(&[vec![vec![[3.0], [-1.0]]]], Some(GradientClippingConfig::Value(1.0)), [-1.0]);
}

/// A sum in parts is scaled part by part only where that changes nothing.
#[test]
fn a_sum_over_members_is_scaled_as_the_whole_would_be() {
    type B = Replica<Flex>;
    let device = replica::<Flex>(3, Spread::Eager);
    let few = || Tensor::<B, 1>::from_data([1.0f32, 2.0], &device);
    assert_eq!((few().sum() / 0.0).into_scalar(), f32::INFINITY);
    assert_eq!((few().sum() * f32::INFINITY).into_scalar(), f32::INFINITY);
    let large = Tensor::<B, 1>::from_data([1e10f32, -1e10, 0.5], &device).cast(DType::F64);
    assert_eq!(large.sum().cast(DType::F32).into_scalar(), 0.5);
}
