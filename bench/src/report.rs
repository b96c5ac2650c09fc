//! The table on the terminal and the file of the figures.

use std::path::Path;

use serde_json::{Value, json};

use crate::row::{Figure, Result, Samples};

/// Prints the machine and one line per figure.
pub(crate) fn print(figures: &[Figure]) {
    println!("{}", machine());
    println!(
        "{:<24} {:>10} {:>19}  {:<22} {:>10} {:>19} {:>7}",
        "row", "ours", "min..max", "peer", "peer's", "min..max", "ratio"
    );
    for figure in figures {
        let (peer, value, spread) = match &figure.peer {
            Some((name, samples)) => (name.as_str(), number(samples.median()), range(samples)),
            None => ("-", "-".to_owned(), "-".to_owned()),
        };
        let ratio = figure
            .ratio()
            .map_or("-".to_owned(), |ratio| format!("{ratio:.2}x"));
        println!(
            "{:<24} {:>10} {:>19}  {:<22} {:>10} {:>19} {:>7}  {}",
            figure.name,
            number(figure.ours.median()),
            range(&figure.ours),
            peer,
            value,
            spread,
            ratio,
            figure.unit,
        );
    }
}

/// What the figures depend on most; a word is missing where the system does not tell it.
fn machine() -> String {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = text("/proc/cpuinfo");
    let mut models = cpus
        .lines()
        .filter(|line| line.starts_with("model name"))
        .filter_map(|line| line.split(": ").nth(1));
    let model = models.next().unwrap_or("unknown processor");
    format!(
        "{} x {model}, L2 {} each, Linux {}",
        1 + models.count(),
        text("/sys/devices/system/cpu/cpu0/cache/index2/size").trim_end(),
        text("/proc/sys/kernel/osrelease").trim_end(),
    )
}

/// Writes the figures as a JSON list.
pub(crate) fn save(figures: &[Figure], path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let list: Vec<Value> = figures.iter().map(object).collect();
    std::fs::write(path, serde_json::to_string_pretty(&list)? + "\n")?;
    Ok(())
}

fn object(figure: &Figure) -> Value {
    let peer = figure.peer.as_ref();
    json!({
        "name": figure.name,
        "value": figure.ours.median(),
        "unit": figure.unit,
        "spread": spread(&figure.ours),
        "peer": peer.map(|(name, _)| name),
        "peer_value": peer.map(|(_, samples)| samples.median()),
        "peer_spread": peer.map(|(_, samples)| spread(samples)),
        "ratio": figure.ratio(),
        "note": figure.note,
    })
}

fn spread(samples: &Samples) -> Value {
    let (min, max) = samples.range();
    json!([min, max])
}

fn range(samples: &Samples) -> String {
    let (min, max) = samples.range();
    format!("{}..{}", number(min), number(max))
}

fn number(value: f64) -> String {
    if value >= 1000.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_without_a_peer_has_nulls() {
        let mut ours = Samples::default();
        ours.push(2.5);
        let figure = Figure {
            name: "x".into(),
            unit: "Mpps",
            ours,
            peer: None,
            note: "n".into(),
        };
        let value = object(&figure);
        assert_eq!(value["value"], 2.5);
        assert_eq!(value["spread"], json!([2.5, 2.5]));
        assert!(value["peer"].is_null() && value["ratio"].is_null());
    }
}
