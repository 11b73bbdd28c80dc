//! Operations of every kind, each against one device. (That every method of Burn's traits has a case is another test's
//! business: here are those whose shapes, dtypes or placements are easy to get wrong.)

use burn::tensor::{
    DType, Distribution, Int, Shape, Tensor, TensorData,
    activation::{log_softmax, softmax},
    backend::Backend,
    module::{
        adaptive_avg_pool2d, avg_pool2d, conv_transpose2d, conv1d, conv2d, embedding, interpolate, max_pool1d,
        max_pool2d_with_indices, unfold4d,
    },
    ops::{ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions, UnfoldOptions},
    s,
};

use super::{
    programs::{Program, same_as_one_device},
    runs::floats,
};

fn ints<B: Backend, const D: usize>(shape: [usize; D], below: i64, device: &B::Device) -> Tensor<B, D, Int> {
    let num: usize = shape.iter().product();
    let values: Vec<i64> = (0..num as i64).map(|i| (i * 7 + 3) % below).collect();
    Tensor::<B, 1, Int>::from_data(TensorData::from(values.as_slice()), device).reshape(shape)
}

/// A tensor that a product has spread over the members, `[rows, columns]`.
fn shared<B: Backend>(seed: u64, rows: usize, columns: usize, device: &B::Device) -> Tensor<B, 2> {
    floats::<B, 2>(seed, [rows, 5], device).matmul(floats(seed + 1, [5, columns], device))
}

macro_rules! program {
    ($name:ident, $tolerance:expr, |$device:ident| $body:block) => {
        #[test]
        fn $name() {
            struct P;
            impl Program for P {
                fn run<B: Backend>($device: &B::Device) -> Vec<TensorData> $body
            }
            same_as_one_device::<P>($tolerance);
        }
    };
}

program!(a_square_tensor_times_itself, 1e-5, |device| {
    let x = shared::<B>(1, 4, 4, device);
    let y = x.clone().transpose();
    let z = ints::<B, 2>([4, 4], 5, device);
    vec![
        x.clone().matmul(x).into_data(),
        y.clone().matmul(y.clone()).into_data(),
        (y.clone() * y).into_data(),
        z.clone().matmul(z).into_data(),
    ]
});

// One item per member: Flex sums a view of one row otherwise than one of several.
program!(views_of_one_item_summed, 1e-6, |device| {
    let strided = floats::<B, 3>(1, [2, 5, 3], device) * 1.0;
    let repeated = floats::<B, 3>(2, [2, 9, 1], device);
    vec![
        strided.clone().swap_dims(1, 2).slice([0..2, 0..2, 0..5]).sum_dim(1).into_data(),
        strided.swap_dims(1, 2).slice([0..2, 0..2, 0..5]).mean_dim(1).into_data(),
        repeated.clone().expand([2, 9, 3]).mean_dim(1).into_data(),
        repeated.expand([2, 9, 3]).sum_dim(1).into_data(),
    ]
});

program!(products_of_any_rank_and_sharing, 1e-5, |device| {
    let x = floats::<B, 3>(1, [3, 4, 5], device).matmul(floats(2, [3, 5, 6], device));
    let per_batch = x.clone().matmul(floats(3, [1, 6, 2], device));
    let attention = x.clone().matmul(x.clone().swap_dims(1, 2));
    let over_batch = shared::<B>(4, 7, 3, device).transpose().matmul(shared::<B>(6, 7, 2, device));
    let heads = floats::<B, 4>(8, [2, 3, 4, 5], device).matmul(floats(9, [2, 1, 5, 4], device));
    vec![per_batch.into_data(), attention.into_data(), over_batch.into_data(), heads.into_data()]
});

program!(bool_tensors_picked_by_index, 0.0, |device| {
    let mask = shared::<B>(1, 6, 4, device).greater_elem(0.0);
    let rows = Tensor::<B, 1, Int>::from_data([5, 0, 2], device);
    let picked = mask.clone().select(0, rows.clone());
    let columns = mask.clone().select(1, Tensor::from_data([3, 1], device));
    let gathered = mask.clone().gather(1, ints([6, 2], 4, device));
    let combined = picked.clone().bool_and(picked.clone().bool_not()).bool_or(picked.clone());
    // The plain backend may call the result of indexing bytes: compare as floats.
    vec![
        picked.float().into_data(),
        columns.float().into_data(),
        gathered.float().into_data(),
        combined.float().into_data(),
        mask.clone().any_dim(1).float().into_data(),
        mask.all().float().into_data(),
    ]
});

program!(slices_of_every_form, 0.0, |device| {
    let x = shared::<B>(1, 7, 6, device);
    let assigned = x.clone().slice_assign(s![1..3, ..], floats(5, [2, 6], device));
    vec![
        x.clone().slice(s![2..5, ..]).into_data(),
        x.clone().slice(s![.., 1..-1]).into_data(),
        x.clone().slice(s![..;2, ..;-1]).into_data(),
        x.clone().slice(s![-3..]).into_data(),
        assigned.into_data(),
        x.clone().slice_assign(s![.., 0..2], floats(6, [7, 2], device)).into_data(),
        x.clone().slice_fill(s![.., 3..4], 9.0).into_data(),
        x.clone().flip([0, 1]).into_data(),
        x.repeat(&[2, 3]).into_data(),
    ]
});

program!(joins_and_views, 0.0, |device| {
    let x = shared::<B>(1, 6, 4, device);
    let y = shared::<B>(3, 6, 4, device);
    vec![
        Tensor::cat(vec![x.clone(), y.clone()], 0).into_data(),
        Tensor::cat(vec![x.clone(), y.clone()], 1).into_data(),
        Tensor::stack::<3>(vec![x.clone(), y.clone()], 1).into_data(),
        x.clone().reshape([3, 8]).into_data(),
        x.clone().reshape([2, 3, 2, 2]).permute([2, 0, 3, 1]).into_data(),
        x.clone().unsqueeze_dim::<3>(0).expand([3, 6, 4]).into_data(),
        x.clone().unsqueeze_dim::<3>(1).expand([6, 2, 4]).reshape([12, 4]).into_data(),
        x.clone().flatten::<1>(0, 1).into_data(),
        x.clone().unfold::<3, _>(0, 3, 2).into_data(),
        x.unfold::<3, _>(1, 2, 1).into_data(),
        Tensor::cat(y.chunk(3, 0), 0).into_data(),
    ]
});

program!(gathers_and_scatters, 1e-6, |device| {
    let x = shared::<B>(1, 6, 4, device);
    let rows = Tensor::<B, 1, Int>::from_data([1, 1, 5], device);
    vec![
        x.clone().gather(0, ints([6, 4], 6, device)).into_data(),
        x.clone().gather(1, ints([6, 2], 4, device)).into_data(),
        x.clone().gather(0, ints([2, 4], 6, device)).into_data(),
        x.clone()
            .scatter(1, ints([6, 4], 4, device), floats(3, [6, 4], device), burn::tensor::IndexingUpdateOp::Add)
            .into_data(),
        x.clone()
            .scatter(0, ints([6, 4], 6, device), floats(4, [6, 4], device), burn::tensor::IndexingUpdateOp::Add)
            .into_data(),
        x.clone().select(0, rows.clone()).into_data(),
        x.clone()
            .select_assign(0, rows.clone(), floats(5, [3, 4], device), burn::tensor::IndexingUpdateOp::Add)
            .into_data(),
        x.clone().take::<1, 2>(1, Tensor::from_data([3, 0], device)).into_data(),
        x.mask_where(ints::<B, 2>([6, 4], 3, device).equal_elem(1), Tensor::full([6, 4], 2.5, device)).into_data(),
    ]
});

program!(orders_and_running_sums, 1e-5, |device| {
    let x = shared::<B>(1, 7, 5, device);
    let (values, indices) = x.clone().sort_with_indices(1);
    let (largest, at) = x.clone().max_dim_with_indices(0);
    let whole = ints::<B, 2>([7, 5], 31, device);
    vec![
        values.into_data(),
        indices.into_data(),
        largest.into_data(),
        at.into_data(),
        x.clone().sort_descending(0).into_data(),
        x.clone().topk(2, 1).into_data(),
        x.clone().argmax(1).into_data(),
        x.clone().argmin(0).into_data(),
        x.clone().cumsum(0).into_data(),
        x.clone().cumprod(1).into_data(),
        whole.clone().argmax(0).into_data(),
        whole.clone().sort(0).into_data(),
        whole.clone().sum_dim(0).into_data(),
        whole.clone().max_dim(0).into_data(),
        whole.clone().prod_dim(1).into_data(),
        whole.mean().into_data(),
    ]
});

program!(reductions_of_every_form, 1e-5, |device| {
    let x = shared::<B>(1, 7, 5, device);
    let (variance, mean) = x.clone().var_mean(0);
    vec![
        x.clone().sum().into_data(),
        x.clone().prod().into_data(),
        x.clone().max().into_data(),
        x.clone().min().into_data(),
        x.clone().max_abs().into_data(),
        x.clone().mean_dim(0).into_data(),
        x.clone().min_dim(0).into_data(),
        x.clone().prod_dim(0).into_data(),
        x.clone().var(1).into_data(),
        variance.into_data(),
        mean.into_data(),
        softmax(x.clone(), 0).into_data(),
        log_softmax(x.clone(), 1).into_data(),
        x.clone().greater_elem(100.0).any().into_data(),
        // A broadcast operand first, so that a part is a view with strides of zero.
        floats::<B, 2>(2, [4, 1], device).expand([4, 2]).sum().into_data(),
        x.sum_dim(0).expand([7, 5]).sum().into_data(),
    ]
});

program!(numbers_that_are_not, 0.0, |device| {
    let values = [1.0, f32::NAN, f32::INFINITY, -f32::INFINITY, -0.0, 0.0];
    let x = Tensor::<B, 1>::from_data(values, device).reshape([6, 1]) * Tensor::<B, 2>::ones([1, 2], device);
    vec![
        x.clone().is_nan().into_data(),
        x.clone().is_inf().into_data(),
        (x.clone() + 1.0).into_data(),
        x.clone().sum_dim(0).into_data(),
        x.clone().slice(s![2..6, ..]).max_dim(0).into_data(),
        x.clone().clamp(-1.0, 1.0).into_data(),
        Tensor::<B, 1>::full([2], -0.0, device).recip().into_data(),
        x.recip().into_data(),
    ]
});

program!(halves_and_doubles, 1e-3, |device| {
    let results = |dtype: DType| {
        let x = shared::<B>(1, 6, 4, device).cast(dtype);
        let large = Tensor::<B, 1>::from_data([6e4f32, 6e4, -6e4, -6e4], device).cast(dtype);
        vec![
            x.clone().mean_dim(0).into_data(),
            x.clone().matmul(x.clone().transpose()).into_data(),
            (x.clone() * 2.0 + x).into_data(),
            large.clone().sum().into_data(),
            large.mean().into_data(),
        ]
    };
    [DType::F16, DType::BF16, DType::F64].into_iter().flat_map(results).collect()
});

program!(convolutions_of_every_form, 1e-4, |device| {
    let x = floats::<B, 4>(1, [5, 4, 7, 6], device);
    let line = floats::<B, 3>(2, [5, 4, 9], device);
    let up = ConvTransposeOptions::new([1, 1], [0, 0], [1, 1], [2, 2], 1);
    vec![
        conv2d(
            x.clone(),
            floats(3, [6, 2, 3, 3], device),
            Some(floats(4, [6], device)),
            ConvOptions::new([2, 1], [1, 0], [1, 2], 2),
        )
        .into_data(),
        conv1d(line.clone(), floats(5, [3, 4, 3], device), None, ConvOptions::new([1], [1], [1], 1)).into_data(),
        conv_transpose2d(x.clone(), floats(6, [4, 3, 2, 2], device), None, up).into_data(),
        max_pool1d(line, 3, 2, 1, 1, true).into_data(),
        avg_pool2d(x.clone(), [3, 2], [2, 2], [1, 0], false, true).into_data(),
        adaptive_avg_pool2d(x.clone(), [3, 2]).into_data(),
        interpolate(x.clone(), [5, 9], InterpolateOptions::new(InterpolateMode::Bilinear)).into_data(),
        unfold4d(x.clone(), [2, 3], UnfoldOptions::new([1, 2], [1, 0], [1, 1])).into_data(),
        // A window larger than the image, which only the backend has an opinion on.
        burn::tensor::module::max_pool2d(
            x.clone().narrow(2, 0, 2).narrow(3, 0, 2),
            [3, 3],
            [1, 1],
            [0, 0],
            [1, 1],
            true,
        )
        .into_data(),
        {
            let (pooled, indices) = max_pool2d_with_indices(x, [2, 2], [2, 2], [0, 0], [1, 1], false);
            (pooled * indices.float()).into_data()
        },
    ]
});

program!(embeddings_and_draws, 1e-6, |device| {
    let words = ints::<B, 2>([6, 3], 11, device);
    let embedded = embedding(floats(1, [11, 4], device), words.clone());
    let noise = Tensor::<B, 3>::random(Shape::new([6, 3, 4]), Distribution::Normal(0.0, 1.0), device);
    vec![
        embedded.clone().into_data(),
        (embedded + noise).into_data(),
        words.clone().one_hot::<3>(11).into_data(),
        words.clone().float().random_like(Distribution::Uniform(-1.0, 1.0)).into_data(),
        words.greater_elem(4).argwhere().into_data(),
    ]
});

mod gradients {
    use bonfire::{Replica, Spread};
    use burn::{
        backend::Autodiff,
        nn::{
            LayerNormConfig,
            attention::{MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask},
            conv::ConvTranspose2dConfig,
            gru::GruConfig,
            lstm::LstmConfig,
        },
        tensor::backend::AutodiffBackend,
    };
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::runs::{ALWAYS, draw_alone, replica};

    /// The gradient that reaches the input of a layer.
    fn input_gradient<B: AutodiffBackend, const D: usize, const E: usize>(
        x: Tensor<B, D>,
        layer: impl FnOnce(Tensor<B, D>) -> Tensor<B, E>,
    ) -> TensorData {
        let x = x.require_grad();
        let loss = layer(x.clone()).square().mean();
        x.grad(&loss.backward()).unwrap().into_data()
    }

    fn layers<B: AutodiffBackend>(device: &B::Device) -> Vec<TensorData> {
        B::seed(device, 5);
        let sequence = || floats::<B, 3>(1, [5, 4, 8], device);
        let attention = MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0).init::<B>(device);
        let norm = LayerNormConfig::new(8).init::<B>(device);
        let lstm = LstmConfig::new(8, 6, true).init::<B>(device);
        let gru = GruConfig::new(8, 6, true).init::<B>(device);
        // An output padding that is not below the stride.
        let up =
            ConvTranspose2dConfig::new([3, 2], [2, 2]).with_dilation([2, 2]).with_padding_out([1, 1]).init::<B>(device);
        vec![
            input_gradient(sequence(), |x| {
                let mask = generate_autoregressive_mask(5, 4, device);
                attention.forward(MhaInput::self_attn(x).mask_attn(mask)).context
            }),
            input_gradient(sequence(), |x| norm.forward(x)),
            input_gradient(sequence(), |x| lstm.forward(x, None).0),
            input_gradient(sequence(), |x| gru.forward(x, None)),
            input_gradient(floats::<B, 4>(2, [5, 3, 4, 4], device), |x| up.forward(x)),
            input_gradient(floats::<B, 2>(3, [11, 4], device), |weights| {
                embedding(weights, ints::<B, 2>([6, 3], 11, device))
            }),
        ]
    }

    #[test]
    fn layers_give_the_gradients_of_one_device() {
        let _alone = draw_alone();
        let expected = layers::<Autodiff<Flex>>(&FlexDevice);
        for num_members in 1..=4 {
            for spread in [ALWAYS, Spread::Eager] {
                let found = layers::<Autodiff<Replica<Flex>>>(&replica(num_members, spread));
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert_eq!(found.shape, expected.shape);
                    for (ours, theirs) in found.iter::<f64>().zip(expected.iter::<f64>()) {
                        assert!(
                            (ours - theirs).abs() <= 1e-5 * theirs.abs().max(1.0),
                            "layer {index} on {num_members} members, {spread:?}: {ours}, on one device {theirs}"
                        );
                    }
                }
            }
        }
    }
}

mod the_backend {
    use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Shares, Spread};
    use burn::tensor::quantization::{Calibration, QuantScheme, QuantStore, compute_q_params, compute_range};
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::runs::{ALWAYS, replica};

    type R = Replica<Flex>;

    #[test]
    fn dtypes_names_and_cleaning_are_those_of_the_inner_backend() {
        let device = replica::<Flex>(2, ALWAYS);
        for dtype in [DType::F32, DType::F16, DType::I64, DType::U8, DType::Flex32] {
            assert_eq!(R::dtype_usage(&device, dtype), Flex::dtype_usage(&FlexDevice, dtype));
            assert_eq!(R::supports_dtype(&device, dtype), Flex::supports_dtype(&FlexDevice, dtype));
        }
        assert!(R::name(&device).contains(&Flex::name(&FlexDevice)));
        R::memory_cleanup(&device);
        R::sync(&device).unwrap();
    }

    /// With the default scheme too, which Flex stores in another way than it says.
    #[test]
    fn a_spread_tensor_can_be_quantized_and_back() {
        for scheme in [QuantScheme::default(), QuantScheme::default().with_store(QuantStore::Native)] {
            quantized_and_back(scheme);
        }
    }

    fn quantized_and_back(scheme: QuantScheme) {
        let run = |x: Tensor<R, 2>| {
            let range = compute_range(&scheme, &x, &Calibration::MinMax);
            x.quantize(&scheme, compute_q_params(&scheme, range)).dequantize().into_data()
        };
        let home = run(shared::<R>(1, 8, 4, &replica(1, Spread::OnHeavyOp { min_work: usize::MAX })));
        for num_members in 1..=4 {
            let found = run(shared::<R>(1, 8, 4, &replica(num_members, ALWAYS)));
            for (ours, theirs) in found.iter::<f64>().zip(home.iter::<f64>()) {
                assert!((ours - theirs).abs() < 0.02, "{ours}, at home {theirs}");
            }
        }
    }

    /// Shares that leave a member idle, the first one too.
    #[test]
    fn members_without_a_share_do_not_change_results() {
        let expected = shared::<Flex>(1, 7, 3, &FlexDevice);
        for shares in [Shares::Weighted(vec![0, 1, 2]), Shares::Weighted(vec![1, 0, 0]), Shares::First(0)] {
            let options = ReplicaOptions { shares: shares.clone(), spread: ALWAYS, ..Default::default() };
            let device = ReplicaDevice::<Flex>::with_options(vec![FlexDevice; 3], options).unwrap();
            let y = shared::<R>(1, 7, 3, &device);
            let close = |found: TensorData, expected: TensorData| {
                found.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-5));
            };
            close(y.clone().into_data(), expected.clone().into_data());
            close(y.clone().mean_dim(0).into_data(), expected.clone().mean_dim(0).into_data());
            close(y.clone().max_dim(0).into_data(), expected.clone().max_dim(0).into_data());
            let image = |x: Tensor<R, 2>| x.reshape([7, 1, 1, 3]);
            let (pooled, _) = max_pool2d_with_indices(image(y), [1, 3], [1, 3], [0, 0], [1, 1], false);
            close(pooled.flatten::<2>(1, 3).into_data(), expected.clone().max_dim(1).into_data());
        }
    }
}
