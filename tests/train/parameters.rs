//! What ranks compare and share before the first step.

use std::{num::NonZeroUsize, time::Duration};

use bonfire::collectives::{Communicator, ThreadCommunicator, run_ranks};
use bonfire::train::{TrainError, broadcast_parameters, check_consistency, compare_parameters, parameters};
use burn::{
    backend::Autodiff,
    module::{Module, Param, ParamId},
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{Bool, DType, Int, Tensor, TensorData, backend::Backend},
};
use burn_flex::Flex;

type B = Autodiff<Flex>;

#[derive(Module, Debug)]
struct Small<B: Backend> {
    layers: Vec<Linear<B>>,
    norm: Option<BatchNorm<B>>,
    positions: Param<Tensor<B, 1, Int>>,
    mask: Param<Tensor<B, 1, Bool>>,
}

fn small(widths: &[usize], first: i64, mask: [bool; 2]) -> Small<B> {
    let device = Default::default();
    let positions = Tensor::from_data(TensorData::from([first, 9_007_199_254_740_993]), (&device, DType::I64));
    let mask = Tensor::from_data(TensorData::from(mask), &device);
    Small {
        layers: widths.windows(2).map(|pair| LinearConfig::new(pair[0], pair[1]).init(&device)).collect(),
        norm: Some(BatchNormConfig::new(2).init(&device)),
        positions: Param::initialized(ParamId::new(), positions),
        mask: Param::initialized(ParamId::new(), mask),
    }
}

fn each_rank<R: Send>(num: usize, body: impl Fn(ThreadCommunicator) -> R + Sync) -> Vec<R> {
    run_ranks(NonZeroUsize::new(num).unwrap(), Duration::from_secs(10), body)
}

#[test]
fn tensors_are_listed_in_order_with_paths_and_whether_they_are_trained() {
    let list: Vec<_> = parameters::<B, _>(&small(&[3, 2], 1, [true, false]))
        .iter()
        .map(|parameter| (parameter.name.clone(), parameter.shape.to_vec(), parameter.is_trained))
        .collect();
    let expected = [
        ("layers.0.weight", vec![3, 2], true),
        ("layers.0.bias", vec![2], true),
        ("norm.gamma", vec![2], true),
        ("norm.beta", vec![2], true),
        ("norm.running_mean", vec![2], false),
        ("norm.running_var", vec![2], false),
        ("positions", vec![2], false),
        ("mask", vec![2], false),
    ];
    assert_eq!(list, expected.map(|(name, shape, trained)| (name.to_owned(), shape, trained)));
}

/// CASES 33
#[test]
fn models_that_differ_between_ranks_are_an_error_on_every_rank_that_names_the_parameter() {
    for (widths, expected) in [
        (&[3, 5, 2][..], "parameter 0 of rank 2 is `layers.0.weight` (F32 [3, 5], trained), of rank 0"),
        (&[3, 4, 2, 2], "parameter 4 of rank 2 is `layers.2.weight` (F32 [2, 2], trained), of rank 0 `norm.gamma`"),
        (&[3, 4], "parameter 2 of rank 2 is `norm.gamma` (F32 [2], trained), of rank 0 `layers.1.weight`"),
    ] {
        let errors = each_rank(3, |communicator| {
            let widths = if communicator.rank() == 2 { widths } else { &[3, 4, 2] };
            let list = parameters::<B, _>(&small(widths, 1, [true, true]));
            compare_parameters(&communicator, &list, "mean").unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains(expected), "{error}");
        }
    }
}

#[test]
fn other_settings_are_an_error_on_every_rank() {
    let errors = each_rank(2, |communicator| {
        let setting = if communicator.rank() == 0 { "mean" } else { "sum" };
        let list = parameters::<B, _>(&small(&[3, 2], 1, [true, true]));
        compare_parameters(&communicator, &list, setting).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("setting of rank 1 is sum, of rank 0 mean"), "{error}");
    }
}

/// CASES 25
#[test]
fn integer_and_bool_tensors_come_from_rank_0_exactly_and_ids_stay_each_ranks_own() {
    let models = each_rank(4, |communicator| {
        let rank = communicator.rank();
        let model = if rank == 0 {
            small(&[3, 4, 2], 9_007_199_254_740_993, [true, false])
        } else {
            small(&[3, 4, 2], rank as i64, [false, true])
        };
        let ids: Vec<_> = parameters::<B, _>(&model).iter().map(|parameter| parameter.id).collect();
        let model: Small<B> = broadcast_parameters::<B, _>(&communicator, model).unwrap();
        let list = parameters::<B, _>(&model);
        assert_eq!(list.iter().map(|parameter| parameter.id).collect::<Vec<_>>(), ids);
        assert!(list[0].is_trained && !list[6].is_trained, "what is trained stays trained");
        check_consistency::<B, _>(&communicator, &model, 0).unwrap();
        (ids, model.layers[1].weight.val().into_data(), model.positions.val().into_data(), model.mask.val().into_data())
    });
    for (ids, weight, positions, mask) in &models {
        assert_eq!(weight, &models[0].1);
        assert_eq!(positions, &TensorData::from([9_007_199_254_740_993i64, 9_007_199_254_740_993]));
        assert_eq!(mask.iter::<bool>().collect::<Vec<_>>(), [true, false]);
        assert!(std::ptr::eq(ids, &models[0].0) || ids[0] != models[0].0[0], "ids are random on each rank");
    }
}

#[test]
fn a_drifted_parameter_is_named_with_its_rank_on_every_rank() {
    let errors = each_rank(3, |communicator| {
        let rank = communicator.rank();
        let mut model: Small<B> =
            broadcast_parameters::<B, _>(&communicator, small(&[3, 4, 2], 1, [true, true])).unwrap();
        if rank == 1 {
            model.layers[1].bias =
                model.layers[1].bias.take().map(|bias| bias.map(|bias| (bias + 1e-6).detach().require_grad()));
        }
        check_consistency::<B, _>(&communicator, &model, 7).unwrap_err()
    });
    for error in errors {
        let TrainError::Drifted { parameter, drifted, num_windows, .. } = &error else { panic!("{error}") };
        assert_eq!((parameter.as_str(), drifted.as_slice(), *num_windows), ("layers.1.bias", &[1][..], 7));
    }
}

#[test]
fn a_weight_that_occurs_twice_stays_one_leaf() {
    for (num_trained, gradient) in each_rank(2, |communicator| {
        let shared = small(&[2, 2], 1, [true, true]).layers.remove(0);
        let mut model = small(&[2, 2, 2], 1, [true, true]);
        shared.weight.val();
        model.layers = vec![shared.clone(), shared];
        let model: Small<B> = broadcast_parameters::<B, _>(&communicator, model).unwrap();
        let x = Tensor::<B, 2>::ones([1, 2], &Default::default());
        let output = model.layers[1].forward(model.layers[0].forward(x));
        let gradients = GradientsParams::from_grads(output.sum().backward(), &model);
        let id = model.layers[0].weight.id;
        let weight: Vec<f32> = model.layers[0].weight.val().into_data().iter::<f32>().collect();
        // Of the sum of x * W * W + ..., for x of ones: both uses count.
        let first = gradients.get::<Flex, 2>(id).unwrap().into_data().iter::<f32>().next().unwrap();
        let hidden = weight[0] + weight[2];
        let bias = model.layers[0].bias.as_ref().unwrap().val().into_data().iter::<f32>().next().unwrap();
        let expected = weight[0] + weight[1] + hidden + bias;
        let num_trained = parameters::<B, _>(&model).iter().filter(|parameter| parameter.is_trained).count();
        (num_trained, first - expected)
    }) {
        assert_eq!(num_trained, 4, "weight and bias once, gamma and beta");
        assert!(gradient.abs() < 1e-5, "{gradient}");
    }
}
