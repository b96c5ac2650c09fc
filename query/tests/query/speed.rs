//! How fast, for docs/query.md: `cargo test --release -p vnplug-query speed -- --ignored --nocapture`.

use std::fs;
use std::time::Instant;

use crate::lab::{Lab, Random, SECOND, START_NS, Sample, run, udp};

/// 1 GB in four segments over an hour: most packets belong to few of many flows, and are long.
fn record(lab: &Lab) -> (u64, u64) {
    let mut random = Random(7);
    let mut flows: Vec<([u8; 4], [u8; 4], [u16; 2])> = Vec::new();
    let mut ts_ns = START_NS;
    for sequence in 0..4 {
        let mut packets = Vec::with_capacity(PACKETS);
        for _ in 0..PACKETS {
            ts_ns += random.below(2 * 900 * SECOND / PACKETS as u64);
            if flows.len() < 64 || random.below(40) == 0 {
                let mut byte = || random.below(256) as u8;
                let (a, b, c, d) = (byte(), byte(), byte(), byte());
                let server = [10, 0, a & 1, b];
                let ports = [
                    [443, 80, 53, 8080][usize::from(c & 3)],
                    1024 + u16::from(d) * 200,
                ];
                flows.push((server, [c, d, a, b], ports));
            }
            let count = flows.len() as u64;
            let back = random.below(count.min(2000)) * random.below(1000) / 1000;
            let (server, client, [low, high]) = flows[(count - 1 - back) as usize];
            let len = [1400, 1400, 1400, 1400, 1400, 60, 60, 590][random.below(8) as usize];
            let frame = match random.below(3) {
                0 => udp(client, server, [high, low], len),
                _ => udp(server, client, [low, high], len),
            };
            packets.push(Sample::new(ts_ns, frame));
        }
        lab.segment(sequence, &packets);
    }
    (4 * PACKETS as u64, size(lab, "pcapng"))
}

fn size(lab: &Lab, extension: &str) -> u64 {
    let files = fs::read_dir(&lab.0).unwrap().map(Result::unwrap);
    let ours = files.filter(|file| file.path().extension().is_some_and(|e| e == extension));
    ours.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
#[ignore = "makes 1 GB and prints what docs/query.md says"]
fn speed() {
    let lab = Lab::new("speed");
    let (packets, bytes) = record(&lab);
    let place = lab.0.to_str().unwrap();
    let timed = |words: &[&str]| {
        let began = Instant::now();
        let output = run(words);
        assert!(output.status.success(), "{output:?}");
        began.elapsed()
    };
    for threads in ["1", "2"] {
        for file in fs::read_dir(&lab.0)
            .unwrap()
            .map(|file| file.unwrap().path())
        {
            if file
                .extension()
                .is_some_and(|extension| extension == "parquet")
            {
                fs::remove_file(file).unwrap();
            }
        }
        let took = timed(&["--prepare", place, "--threads", threads]);
        println!(
            "made with {threads} threads: {packets} packets, {bytes} bytes in {took:?}: {:.2} M packets/s, \
             {:.2} % of the segments",
            packets as f64 / took.as_secs_f64() / 1e6,
            size(&lab, "parquet") as f64 * 100.0 / bytes as f64,
        );
    }
    println!("{} rows", lab.number("select count(*) from flows", &[]));
    for sql in [
        "select src, sum(bytes) b from flows group by src order by b desc limit 10",
        "select minute, dst_port, sum(bytes) from flows group by 1, 2 order by 3 desc limit 10",
        "select sum(packets) from flows where src = '10.0.1.77'",
        "select sum(packets) from flows where in_net(dst, '77.0.0.0/8')",
        "select sum(packets), sum(bytes) from flows",
        "select count(*) from segments",
    ] {
        let times: Vec<_> = (0..3).map(|_| timed(&[sql, place])).collect();
        println!("{times:?} {sql}");
    }
    let times = timed(&[
        "select sum(bytes) from flows",
        place,
        "--from",
        "2026-11-21T14:30:00Z",
    ]);
    println!("{times:?} with --from, one segment of four");
}

/// Of a segment.
const PACKETS: usize = 250_000;
