//! What a training step in steady state costs in collectives, and what other threads cannot change about it.

use std::sync::mpsc::channel;

use bonfire::{
    Replica, ReplicaDevice,
    collectives::{Collective, Tally},
};
use burn::{
    backend::Autodiff,
    grad_clipping::GradientClippingConfig,
    module::AutodiffModule,
    nn::loss::CrossEntropyLossConfig,
    optim::{
        AdamConfig, AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig, momentum::MomentumConfig,
    },
    tensor::{Int, Tensor, TensorData, backend::Backend},
};
use burn_flex::Flex;

use super::{
    models::{Classifier, Cnn, Mlp},
    runs::{ALWAYS, draw_alone, floats, parameters, replica},
};

type B = Replica<Flex>;
type Ad = Autodiff<B>;

fn loss<M: Classifier<Ad>>(model: &M, step: u64, batch_size: usize, device: &ReplicaDevice<Flex>) -> Tensor<Ad, 1> {
    let images = floats::<Ad, 4>(step, [batch_size, 1, 12, 12], device);
    let labels: Vec<i64> = (0..batch_size as i64).map(|item| item % 10).collect();
    let labels = Tensor::<Ad, 1, Int>::from_data(TensorData::from(labels.as_slice()), device);
    CrossEntropyLossConfig::new().init(device).forward(model.forward(images), labels)
}

/// The collectives of the third step, in which `num_micro_steps` gradients are accumulated; and how many numbers the
/// parameters hold.
fn third_step<M, O>(optimizer: O, num_micro_steps: usize) -> (Tally, usize)
where
    M: Classifier<Ad> + AutodiffModule<Ad>,
    O: Optimizer<M, Ad>,
{
    let _alone = draw_alone();
    let device = replica::<Flex>(3, ALWAYS);
    let mut optimizer = optimizer;
    let mut model = M::init(&device);
    let mut tally = Tally::default();
    for step in 0..3 {
        B::sync(&device).unwrap();
        let before = device.collectives().tally();
        let mut accumulator = GradientsAccumulator::new();
        for micro_step in 0..num_micro_steps {
            let loss = loss(&model, (step * 7 + micro_step) as u64, 9, &device);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            accumulator.accumulate(&model, grads);
            if micro_step + 1 == num_micro_steps {
                loss.into_scalar();
            }
        }
        model = optimizer.step(1e-3, model, accumulator.grads());
        B::sync(&device).unwrap();
        tally = device.collectives().tally() - before;
    }
    (tally, parameters(&model).len())
}

/// One collective for the gradients, one for the loss that is read, and `num_statistics` for batch statistics; the
/// gradients are the only large ones.
fn assert_cost(name: &str, (tally, num_parameters): (Tally, usize), num_statistics: u64, statistics_bytes: u64) {
    let num_calls = tally.num_calls(Collective::AllReduce);
    assert!(num_calls <= 2 + num_statistics, "{name}: {tally}");
    assert_eq!(tally.total_calls(), num_calls, "{name} takes something else than all_reduces: {tally}");
    let gradients = 4 * num_parameters as u64;
    let bytes = tally.num_bytes(Collective::AllReduce);
    assert!(bytes >= gradients, "{name}: {tally}, gradients have {gradients} bytes");
    assert!(
        bytes - statistics_bytes <= gradients + gradients / 100 + 8,
        "{name}: {tally}, gradients have {gradients} bytes"
    );
}

#[test]
fn a_step_of_an_mlp_sums_its_gradients_in_one_collective() {
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let clipped = AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.5)));
    assert_cost("Adam", third_step::<Mlp<Ad>, _>(AdamConfig::new().init(), 1), 0, 0);
    assert_cost("AdamW", third_step::<Mlp<Ad>, _>(AdamWConfig::new().init(), 1), 0, 0);
    assert_cost("SGD", third_step::<Mlp<Ad>, _>(SgdConfig::new().init(), 1), 0, 0);
    assert_cost("SGD with momentum", third_step::<Mlp<Ad>, _>(momentum.init(), 1), 0, 0);
    assert_cost("Adam, clipped by norm", third_step::<Mlp<Ad>, _>(clipped.init(), 1), 0, 0);
}

/// Gradients of what is broadcast are sums over dims, as statistics are.
#[test]
fn a_model_of_scales_and_biases_sums_its_gradients_together() {
    #[derive(burn::module::Module, Debug)]
    struct Affine<B: Backend> {
        scales: Vec<burn::module::Param<Tensor<B, 4>>>,
        output: burn::nn::Linear<B>,
    }

    impl<B: Backend> Classifier<B> for Affine<B> {
        fn init(device: &B::Device) -> Self {
            let scale = || burn::module::Param::from_tensor(Tensor::ones([1, 1, 1, 12], device));
            Self { scales: vec![scale(), scale(), scale()], output: burn::nn::LinearConfig::new(144, 10).init(device) }
        }

        fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
            let scaled = self.scales.iter().fold(images, |x, scale| x * scale.val() + scale.val());
            self.output.forward(scaled.flatten(1, 3))
        }
    }

    let (tally, _) = third_step::<Affine<Ad>, _>(AdamConfig::new().init(), 1);
    // The loss, at most one gradient that looks like a statistic, all others.
    assert!(tally.num_calls(Collective::AllReduce) <= 3, "{tally}");
    assert_eq!(tally.total_calls(), tally.num_calls(Collective::AllReduce), "{tally}");
}

/// Two BatchNorms, of 8 and 12 channels: two statistics forward, two backward each, of 4 bytes per channel.
#[test]
fn a_step_of_a_cnn_adds_four_small_ones_per_batch_norm() {
    let statistics_bytes = 4 * 4 * (8 + 12);
    assert_cost("CNN", third_step::<Cnn<Ad>, _>(AdamConfig::new().init(), 1), 8, statistics_bytes);
}

/// What a learner shows beside the loss: accuracy, top-3 accuracy, a mean of squares.
#[test]
fn metrics_of_a_batch_gather_nothing() {
    let device = replica::<Flex>(3, ALWAYS);
    let logits = floats::<B, 2>(1, [9, 4], &device).matmul(floats(2, [4, 10], &device));
    let labels = Tensor::<B, 1, Int>::from_data([3i64, 1, 4, 1, 5, 9, 2, 6, 5], &device);
    let before = device.collectives().tally();
    let right = logits.clone().argmax(1).reshape([9]).equal(labels.clone()).int().sum();
    let own = logits.clone().gather(1, labels.clone().reshape([9, 1]));
    let is_among_three = logits.clone().greater(own).int().sum_dim(1).lower_elem(3).int().sum();
    let error = (logits - 0.5).powi_scalar(2).mean();
    let (right, among_three) = (right.into_scalar(), is_among_three.into_scalar());
    assert!(right <= among_three && among_three <= 9);
    assert!(error.into_scalar() > 0.0);
    let tally = device.collectives().tally() - before;
    assert_eq!(tally.total_calls(), tally.num_calls(Collective::AllReduce), "{tally}");
    // Three numbers.
    assert!(tally.num_bytes(Collective::AllReduce) <= 3 * 8, "{tally}");
}

/// CASES 6.
#[test]
fn a_window_of_accumulated_micro_steps_sums_its_gradients_once() {
    assert_cost("MLP", third_step::<Mlp<Ad>, _>(AdamConfig::new().init(), 4), 0, 0);
    let statistics_bytes = 4 * 4 * 4 * (8 + 12);
    assert_cost("CNN", third_step::<Cnn<Ad>, _>(AdamConfig::new().init(), 4), 4 * 8, statistics_bytes);
}

#[test]
fn a_metrics_thread_that_reads_losses_changes_neither_collectives_for_gradients_nor_bits() {
    let _alone = draw_alone();
    let run = |reads: bool| {
        let device = replica::<Flex>(3, ALWAYS);
        <B as Backend>::seed(&device, 9);
        let mut model = Mlp::<Ad>::init(&device);
        let mut optimizer = AdamConfig::new().init();
        let (losses, metrics) = channel::<Tensor<B, 1>>();
        let reader = std::thread::spawn(move || {
            for loss in metrics {
                if reads {
                    // A metric reads the loss, and computes with it.
                    assert!(loss.clone().into_scalar().is_finite());
                    assert!((loss * 0.3).into_scalar().is_finite());
                }
            }
        });
        let mut kept = Vec::new();
        for step in 0..20 {
            let loss = loss(&model, step, 9, &device);
            losses.send(loss.clone().inner()).unwrap();
            // Before the optimizer forms all sums, and after.
            kept.push((loss.clone().inner() * 0.3).into_scalar());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, grads);
            kept.push((loss.inner() * 0.7).exp().into_scalar());
        }
        drop(losses);
        reader.join().unwrap();
        (kept, parameters(&model), device.collectives().tally().num_bytes(Collective::AllReduce))
    };
    let (losses, parameters, bytes) = run(false);
    for _ in 0..3 {
        let (read_losses, read_parameters, read_bytes) = run(true);
        assert_eq!((read_losses, read_parameters), (losses.clone(), parameters.clone()));
        // Losses alone: 4 bytes each, read at most twice.
        assert!(read_bytes.abs_diff(bytes) <= 20 * 2 * 4, "{read_bytes} bytes, without a reader {bytes}");
    }
}
