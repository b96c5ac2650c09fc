//! What merging costs, and what it costs where nothing merges.

use std::time::Instant;

use super::*;

/// Nanoseconds for a frame of this batch, the median of eleven rounds.
fn cost(limits: &Limits, frames: &[(Vec<u8>, Option<Offload>)], is_valid: bool) -> f64 {
    let mut aggregator = Aggregator::default();
    let mut rounds = [0.0; 11];
    for round in &mut rounds {
        let begin = Instant::now();
        for _ in 0..200 {
            aggregator.run(limits, frames.len(), |at| Single {
                head: &frames[at].0,
                body: &[],
                missing: 0,
                offload: None,
                is_valid,
            });
        }
        *round = begin.elapsed().as_nanos() as f64 / (200 * frames.len()) as f64;
    }
    rounds.sort_by(f64::total_cmp);
    rounds[5]
}

#[test]
#[ignore = "measures"]
fn of_a_frame() {
    let stream = |len: usize| {
        let recipe = |nth: usize| Recipe {
            id: nth as u16,
            seq: (nth * len) as u32,
            len,
            ..PLAIN
        };
        let frames = (0..128).map(|nth| (frame(&recipe(nth)), None));
        frames.collect::<Vec<_>>()
    };
    let flood = |nth: u32| Recipe {
        ports: nth * 77,
        len: 1448,
        ..PLAIN
    };
    let flood: Vec<_> = (0..128).map(|nth| (frame(&flood(nth)), None)).collect();
    for limit in [2, 8, 20, 44] {
        let [checked, valid] = [false, true].map(|it| cost(&all(limit), &stream(1448), it));
        println!(
            "{limit} segments of 1448 bytes: {checked:.0} ns, {valid:.0} if a card checked them"
        );
    }
    println!(
        "44 segments of 100 bytes: {:.0} ns",
        cost(&all(44), &stream(100), false)
    );
    println!("one of each flow: {:.0} ns", cost(&all(44), &flood, false));
}
