// Tiles the sites of a study and computes their features, each site in `parts` jobs, by any executor of Nextflow.
//
//   nextflow run .../main.nf --study /srv/study --sites C1,C2 --parts 4
//
// The study is a folder that all nodes see; nothing goes through Nextflow's work folder, so -resume goes on where it was.
params.study = '.'
params.sites = 'C1'
params.parts = 4

process TILE {
    tag "${site} ${part}"
    input:
    tuple val(site), val(part)
    output:
    tuple val(site), val(part)
    script:
    "cd '${params.study}' && wsi-fl tile --site ${site} --part ${part}/${params.parts}"
}

process FEATURES {
    tag "${site} ${part}"
    input:
    tuple val(site), val(part)
    output:
    tuple val(site), val(part)
    script:
    "cd '${params.study}' && wsi-fl features --site ${site} --part ${part}/${params.parts}"
}

workflow {
    parts = Channel.of(1..params.parts)
    sites = Channel.of(params.sites.tokenize(',')).flatten()
    tiled = TILE(sites.combine(parts)).groupTuple(size: params.parts).map { site, numbers -> site }
    FEATURES(tiled.combine(parts))
}
