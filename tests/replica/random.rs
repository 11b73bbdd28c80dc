//! Draws from counters: the same numbers for any number of members, any shares, and wherever they are used.

use bonfire::{
    Member, RandomMode, RandomState, Replica, ReplicaDevice, ReplicaError, ReplicaOptions, Shares, Spread,
    collectives::Tally,
};
use burn::{
    backend::Autodiff,
    nn::DropoutConfig,
    tensor::{Distribution, Int, Tensor},
};
use burn_backend::{
    Backend, DType, FloatDType, IntDType, Scalar, Shape, TensorData,
    ops::{FloatTensorOps, IntTensorOps},
    read_sync,
};
use burn_flex::{Flex, FlexDevice};
use burn_ndarray::NdArray;

use super::{
    faults::panic_of,
    models::{Cnn, Mlp},
    probe::{Probe, ProbeDevice},
    runs::{ALWAYS, F32, assert_equal, draw_alone, floats, train},
};

type B = Replica<Flex>;

const FLOATS: [FloatDType; 4] = [FloatDType::F64, FloatDType::F32, FloatDType::F16, FloatDType::BF16];
const INTS: [IntDType; 8] = [
    IntDType::I64,
    IntDType::I32,
    IntDType::I16,
    IntDType::I8,
    IntDType::U64,
    IntDType::U32,
    IntDType::U16,
    IntDType::U8,
];
const DISTRIBUTIONS: [Distribution; 4] = [
    Distribution::Default,
    Distribution::Uniform(3.0, 60.0),
    Distribution::Bernoulli(0.4),
    Distribution::Normal(20.0, 4.0),
];

fn counting<M: Member>(devices: Vec<M::Device>, shares: Shares, spread: Spread) -> ReplicaDevice<M> {
    let options = ReplicaOptions { shares, spread, random: RandomMode::Counter, ..Default::default() };
    ReplicaDevice::with_options(devices, options).unwrap()
}

fn members(num_members: usize) -> ReplicaDevice<Flex> {
    counting(vec![FlexDevice; num_members], Shares::Equal, ALWAYS)
}

/// One to four members, with equal and other shares (nothing, among them), spread late and at once.
fn groups<M: Member>() -> Vec<(String, ReplicaDevice<M>)> {
    let weights = [vec![1], vec![1, 3], vec![2, 0, 1], vec![4, 1, 1, 2]];
    let mut groups = Vec::new();
    for weights in weights {
        for shares in [Shares::Equal, Shares::Weighted(weights.clone())] {
            for spread in [ALWAYS, Spread::Eager] {
                let device = counting(vec![M::Device::default(); weights.len()], shares.clone(), spread);
                groups.push((format!("{} members, {shares:?}, {spread:?}", weights.len()), device));
            }
        }
    }
    groups
}

/// Zeros that the members share along dim 0, of shape `[rows, 4]`.
fn shared_zeros<M: Member>(rows: usize, device: &ReplicaDevice<M>) -> Tensor<Replica<M>, 2> {
    let ones = Tensor::<Replica<M>, 2>::ones([rows, 3], device);
    ones.matmul(Tensor::ones([3, 4], device)) - 3.0
}

/// A draw of every distribution and dtype, each read as it is and as members see their parts of it.
fn draws<M: Member>(device: &ReplicaDevice<M>, floats: &[FloatDType], ints: &[IntDType]) -> Vec<[TensorData; 2]> {
    let shape = || Shape::new([7, 4]);
    let zeros = || shared_zeros(7, device).into_primitive().tensor();
    Replica::<M>::seed(device, 11);
    let mut draws = Vec::new();
    for distribution in DISTRIBUTIONS {
        for &dtype in floats {
            let drawn = Replica::<M>::float_random(shape(), distribution, device, dtype);
            let zeros = Replica::<M>::float_cast(zeros(), dtype);
            let parts = Replica::<M>::float_add(zeros, drawn.clone());
            draws.push([drawn, parts].map(|x| read_sync(Replica::<M>::float_into_data(x)).unwrap()));
        }
        for &dtype in ints {
            let drawn = Replica::<M>::int_random(shape(), distribution, device, dtype);
            let zeros = Replica::<M>::float_into_int(zeros(), dtype);
            let parts = Replica::<M>::int_add(zeros, drawn.clone());
            draws.push([drawn, parts].map(|x| read_sync(Replica::<M>::int_into_data(x)).unwrap()));
        }
    }
    draws
}

fn assert_same_draws<M: Member>(floats: &[FloatDType], ints: &[IntDType]) {
    let mut expected: Option<Vec<TensorData>> = None;
    for (context, device) in groups::<M>() {
        let draws = draws(&device, floats, ints);
        let expected = expected.get_or_insert_with(|| draws.iter().map(|[whole, _]| whole.clone()).collect());
        assert_eq!(draws.len(), 4 * (floats.len() + ints.len()));
        for (index, ([whole, parts], expected)) in draws.iter().zip(expected).enumerate() {
            assert_eq!(whole, expected, "{context}, draw {index}");
            assert_eq!(parts, expected, "{context}, parts of draw {index}");
        }
    }
}

#[test]
fn draws_are_the_same_for_any_members_shares_and_placement() {
    assert_same_draws::<Flex>(&FLOATS, &INTS);
    assert_same_draws::<NdArray>(&[FloatDType::F64, FloatDType::F32], &[IntDType::I64, IntDType::I32, IntDType::U8]);
}

#[test]
fn a_draw_that_is_repeated_reshaped_and_used_twice_is_one_tensor() {
    let mut expected = None;
    for (context, device) in groups::<Flex>() {
        B::seed(&device, 3);
        let random = |shape: [usize; 2]| Tensor::<B, 2>::random(shape, Distribution::Normal(0.0, 1.0), &device);
        let (row, column, all, turned) = (random([1, 4]), random([7, 1]), random([7, 4]), random([4, 7]));
        let shared = shared_zeros(7, &device) + row.clone() + column.clone().expand([7, 4]);
        let used = shared.clone() * all.clone() + all.clone() - turned.clone().transpose();
        // What is whole in one place and in parts in another is the same numbers.
        let difference = (shared_zeros(7, &device) + all.clone()) - (all.clone() + 1.0) + 1.0;
        assert!(difference.abs().max().into_scalar() < 1e-6, "{context}");
        let found = [row.into_data(), column.into_data(), all.into_data(), turned.into_data(), used.into_data()];
        assert_eq!(found.as_slice(), expected.get_or_insert_with(|| found.clone()).as_slice(), "{context}");
    }
}

#[test]
fn dropout_drops_the_same_elements_on_any_number_of_members() {
    let dropped = |num_members: usize| {
        let device = members(num_members);
        B::seed(&device, 5);
        let dropout = DropoutConfig::new(0.3).init();
        let activation = shared_zeros(64, &device) + 1.0;
        let dropped = dropout.forward(Tensor::<Autodiff<B>, 2>::from_inner(activation)).into_data();
        dropped.iter::<f32>().map(|x| x == 0.0).collect::<Vec<bool>>()
    };
    let expected = dropped(1);
    assert!((50..110).contains(&expected.iter().filter(|&&dropped| dropped).count()));
    for num_members in 2..=4 {
        assert_eq!(dropped(num_members), expected, "{num_members} members");
    }
}

#[test]
fn models_with_dropout_train_alike_on_any_number_of_members() {
    let mlp = train::<Autodiff<B>, Mlp<_>>(&members(1), 9, 5);
    let cnn = train::<Autodiff<B>, Cnn<_>>(&members(1), 6, 5);
    for num_members in 2..=4 {
        let device = members(num_members);
        let context = |model| format!("{model} on {num_members} members");
        assert_equal(&train::<Autodiff<B>, Mlp<_>>(&device, 9, 5), &mlp, F32, &context("MLP"));
        assert_equal(&train::<Autodiff<B>, Cnn<_>>(&device, 6, 5), &cnn, F32, &context("CNN"));
    }
}

#[test]
fn draws_go_on_from_a_saved_state_on_any_device() {
    let draw = |device: &ReplicaDevice<Flex>| {
        let floats = Tensor::<B, 1>::random([9], Distribution::Normal(0.0, 1.0), device).into_data();
        let ints = Tensor::<B, 1, Int>::random([9], Distribution::Uniform(0.0, 100.0), device).into_data();
        [floats, ints]
    };
    let device = members(2);
    assert_eq!(device.random_state(), Some(RandomState { seed: 0, next_draw: 0 }));
    B::seed(&device, 77);
    let earlier = draw(&device);
    let saved = device.random_state().unwrap();
    assert_eq!(saved, RandomState { seed: 77, next_draw: 2 });
    let written = serde_json::to_string(&saved).unwrap();
    let later = [draw(&device), draw(&device)];
    assert!(later[0] != earlier && later[1] != earlier && later[0] != later[1]);

    for device in [device, members(1), members(3)] {
        device.set_random_state(serde_json::from_str(&written).unwrap()).unwrap();
        assert_eq!([draw(&device), draw(&device)], later);
        B::seed(&device, 77);
        assert_eq!(draw(&device), earlier);
        B::seed(&device, 78);
        assert_ne!(draw(&device), earlier);
    }
}

#[test]
fn a_device_that_draws_from_the_stream_has_no_state() {
    let device = ReplicaDevice::<Flex>::new([FlexDevice]).unwrap();
    assert_eq!(device.options().random, RandomMode::Stream);
    assert_eq!(device.random_state(), None);
    let error = device.set_random_state(RandomState::default()).unwrap_err();
    assert!(matches!(error, ReplicaError::Option { option: "random", .. }), "{error}");
    let options: ReplicaOptions = serde_json::from_str(r#"{"random": "Counter"}"#).unwrap();
    assert_eq!(options, ReplicaOptions { random: RandomMode::Counter, ..Default::default() });
}

/// The generators of Burn's backends belong to the whole process.
#[test]
fn counted_draws_leave_the_inner_backends_stream_alone() {
    let _alone = draw_alone();
    let plain = || Tensor::<Flex, 1>::random([5], Distribution::Default, &FlexDevice).into_data();
    Flex::seed(&FlexDevice, 3);
    let expected = plain();
    Flex::seed(&FlexDevice, 3);
    let device = members(2);
    B::seed(&device, 4);
    Tensor::<B, 1>::random([5], Distribution::Default, &device).into_data();
    assert_eq!(plain(), expected);
}

#[test]
fn a_distribution_without_numbers_panics_where_it_is_asked_for() {
    let device = members(2);
    for distribution in [
        Distribution::Uniform(1.0, 1.0),
        Distribution::Uniform(f64::NAN, 1.0),
        Distribution::Bernoulli(1.5),
        Distribution::Normal(0.0, f64::INFINITY),
    ] {
        let message = panic_of(|| drop(Tensor::<B, 1>::random([2], distribution, &device)));
        assert!(message.contains(&format!("{distribution:?}")), "{message}");
    }
    for distribution in [Distribution::Uniform(0.0, 257.0), Distribution::Uniform(-1.0, 9.0)] {
        let message = panic_of(|| drop(B::int_random(Shape::new([2]), distribution, &device, IntDType::U8)));
        assert!(message.contains(&format!("{distribution:?}")), "{message}");
    }
    assert_eq!(device.random_state().unwrap().next_draw, 0);
    assert!(device.broken().is_none());
}

#[test]
fn members_make_their_own_parts_and_exchange_nothing() {
    let devices = ProbeDevice::fresh(3);
    let device = counting::<Probe>(devices.clone(), Shares::Weighted(vec![1, 2, 3]), ALWAYS);
    let shared = Tensor::<Replica<Probe>, 2>::ones([12, 4], &device).matmul(floats(1, [4, 4], &device));
    Replica::<Probe>::sync(&device).unwrap();
    let before = device.collectives().tally();
    let recordings: Vec<_> = devices.iter().map(|device| device.record()).collect();
    let drawn = Tensor::<Replica<Probe>, 2>::random([12, 4], Distribution::Normal(0.0, 1.0), &device);
    let result = (shared + drawn.clone()) * drawn;
    Replica::<Probe>::sync(&device).unwrap();
    assert_eq!(device.collectives().tally() - before, Tally::default());
    for (rows, recording) in [2, 4, 6].into_iter().zip(recordings) {
        let records = recording.take();
        let made: Vec<usize> = (records.iter().filter(|record| record.name == "float_from_data"))
            .map(|record| record.allocated_bytes)
            .collect();
        assert_eq!(made, [rows * 4 * size_of::<f32>()], "{records:?}");
        assert!(records.iter().all(|record| !record.name.contains("slice") && record.name != "float_random"));
    }
    drop(result);
}

/// Mean, variance, and fourth central moment.
struct Moments {
    mean: f64,
    variance: f64,
    fourth: f64,
}

const NUM_DRAWN: usize = 200_000;

fn assert_moments(values: &[f64], expected: Moments, context: &str) {
    /// Standard deviations.
    const ALLOWED: f64 = 5.0;
    let num = values.len() as f64;
    assert_eq!(values.len(), NUM_DRAWN);
    let mean = values.iter().sum::<f64>() / num;
    let variance = values.iter().map(|x| (x - expected.mean).powi(2)).sum::<f64>() / num;
    let near = |found: f64, expected: f64, variance: f64, what: &str| {
        let limit = ALLOWED * (variance / num).sqrt();
        assert!((found - expected).abs() < limit, "{context}: {what} is {found}, not {expected} within {limit}");
    };
    near(mean, expected.mean, expected.variance, "the mean");
    near(variance, expected.variance, expected.fourth - expected.variance.powi(2), "the variance");
    // Neighbours, of which two come from one block of random bits.
    for distance in 1..=3 {
        let pairs = values.iter().zip(&values[distance..]);
        let product = pairs.map(|(a, b)| (a - expected.mean) * (b - expected.mean)).sum::<f64>() / num;
        near(product, 0.0, expected.variance.powi(2), "the covariance of neighbours");
    }
}

#[test]
fn distributions_have_their_moments_and_ranges() {
    let device = members(2);
    B::seed(&device, 2011);
    let shape = || Shape::new([NUM_DRAWN]);
    let uniform = |low: f64, high: f64| Moments {
        mean: (low + high) / 2.0,
        variance: (high - low).powi(2) / 12.0,
        fourth: (high - low).powi(4) / 80.0,
    };
    let (p, q) = (0.3, 0.7);
    let bernoulli = || Moments { mean: p, variance: p * q, fourth: p * q * (p.powi(3) + q.powi(3)) };
    let normal = || Moments { mean: 1.0, variance: 4.0, fourth: 48.0 };
    for dtype in [FloatDType::F64, FloatDType::F32] {
        let draw = |distribution| -> Vec<f64> {
            let drawn = B::float_random(shape(), distribution, &device, dtype);
            read_sync(B::float_into_data(drawn)).unwrap().iter::<f64>().collect()
        };
        let default = draw(Distribution::Default);
        assert!(default.iter().all(|x| (0.0..1.0).contains(x)));
        assert_moments(&default, uniform(0.0, 1.0), "default");
        let ranged = draw(Distribution::Uniform(-2.0, 3.0));
        assert!(ranged.iter().all(|x| (-2.0..3.0).contains(x)));
        assert_moments(&ranged, uniform(-2.0, 3.0), "uniform");
        let coins = draw(Distribution::Bernoulli(p));
        assert!(coins.iter().all(|&x| x == 0.0 || x == 1.0));
        assert_moments(&coins, bernoulli(), "Bernoulli");
        assert_moments(&draw(Distribution::Normal(1.0, 2.0)), normal(), "normal");
        assert!(draw(Distribution::Bernoulli(1.0)).iter().all(|&x| x == 1.0));
        assert!(draw(Distribution::Bernoulli(0.0)).iter().all(|&x| x == 0.0));
    }

    let draw = |distribution, dtype| -> Vec<f64> {
        let drawn = B::int_random(shape(), distribution, &device, dtype);
        let data = read_sync(B::int_into_data(drawn)).unwrap();
        assert_eq!(data.dtype, DType::from(dtype));
        data.iter::<f64>().collect()
    };
    // Of n whole numbers in a row.
    let die = |low: f64, n: f64| Moments {
        mean: low + (n - 1.0) / 2.0,
        variance: (n * n - 1.0) / 12.0,
        fourth: (n * n - 1.0) * (3.0 * n * n - 7.0) / 240.0,
    };
    let thrown = draw(Distribution::Uniform(-3.0, 7.0), IntDType::I32);
    assert_moments(&thrown, die(-3.0, 10.0), "ten integers");
    for side in -3..7 {
        assert!(thrown.contains(&f64::from(side)), "{side} never comes");
    }
    assert_moments(&draw(Distribution::Default, IntDType::U8), die(0.0, 256.0), "all of u8");
    assert_moments(&draw(Distribution::Default, IntDType::I16), die(-32768.0, 65536.0), "all of i16");
    assert_moments(&draw(Distribution::Bernoulli(p), IntDType::I64), bernoulli(), "Bernoulli integers");
}

/// Chunks of a large tensor are made by several threads.
#[test]
fn large_draws_are_those_of_one_thread() {
    let draw = |num_members| {
        let device = members(num_members);
        B::seed(&device, 1);
        let drawn = B::float_random(Shape::new([3, 50_001]), Distribution::Default, &device, FloatDType::F32);
        let zeros = Tensor::<B, 2>::ones([3, 2], &device).matmul(Tensor::ones([2, 50_001], &device));
        let zeros = B::float_mul_scalar(zeros.into_primitive().tensor(), Scalar::Float(0.0));
        read_sync(B::float_into_data(B::float_add(zeros, drawn))).unwrap()
    };
    let expected = draw(1);
    assert_eq!(draw(3), expected);
    let first = expected.to_vec::<f32>().unwrap()[..10].to_vec();
    let device = members(1);
    B::seed(&device, 1);
    let small = Tensor::<B, 1>::random([10], Distribution::Default, &device).into_data();
    assert_eq!(small.to_vec::<f32>().unwrap(), first, "element i does not depend on how many there are");
}
