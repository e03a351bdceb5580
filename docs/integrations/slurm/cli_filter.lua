-- CliFilterPlugins=cli_filter/lua: this file is cli_filter.lua beside slurm.conf, on every host where jobs are
-- submitted. Where a site has its own already, the lines marked with + go there.
local found, memcalc = pcall(dofile, "/etc/slurm/memcalc/memcalc.lua") -- +

function slurm_cli_setup_defaults(options, early)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
    if found then -- +
        local answer = memcalc.cli_pre_submit(options) -- +
        if answer ~= slurm.SUCCESS then -- +
            return answer -- +
        end -- +
    end -- +
    return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end

return slurm.SUCCESS
